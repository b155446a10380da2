"""Which replica may have a request's KV: by its session, and by how its prompt begins."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pydantic_core import from_json

from coattn.engine.store.keys import digest

BORDERS = tuple(1 << n for n in range(8, 17))
"""A prompt has a key at each of these bytes of text, 256 to 65,536, that it reaches."""
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LENGTH = 16
"""Hexadecimal digits of a key: a collision costs one request a hit, and nothing else."""
MIN_SHARE = 4
"""A known beginning counts if it is at least one part in so many of the prompt."""
SLACK = 4
"""A replica is too busy for a new prompt if it has capacity / SLACK more requests than the quietest one."""


@dataclass(frozen=True)
class Affinity:
    """Keys of one request. Requests with a key in common may share KV."""

    session: str | None = None
    prefix: tuple[str, ...] = ()
    """At the borders, the shortest beginning first."""
    size: int = 0
    """Bytes of the prompt that were looked at."""

    @property
    def keys(self) -> tuple[str, ...]:
        return self.prefix if self.session is None else (self.session, *self.prefix)


NOWHERE = Affinity()


@dataclass(frozen=True)
class Candidate:
    """A replica as its router knows it. load: requests that it has; capacity: those that it may have."""

    name: str
    load: int
    capacity: int


def affinity(path: str, raw: bytes, tenant: bytes) -> Affinity:
    """tenant: who asks. A body that cannot be parsed has no keys: the replica that gets it answers with the error."""
    try:
        body = from_json(raw) if path in (CHAT, TEXT, RESPONSES) else None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return NOWHERE
    own, name = body.get("cache_salt"), body.get("session_id")
    salt = digest("tenant", tenant, own if isinstance(own, str) else "")
    session = digest("session", salt, name).hex()[:LENGTH] if isinstance(name, str) else None
    text = b""
    for part in _prompt(body.get("prompt")) if path == TEXT else _messages(body):
        text += part
        if len(text) >= BORDERS[-1]:
            break
    start, reached = digest("prefix", salt), [border for border in BORDERS if border <= len(text)]
    prefix = [hashlib.sha256(start + text[:border]).hexdigest()[:LENGTH] for border in reached]
    return Affinity(session, tuple(prefix), min(len(text), BORDERS[-1]))


def rank(
    request: Affinity, candidates: Sequence[Candidate], sent: Mapping[str, str], avoid: Iterable[str] = ()
) -> list[list[str]]:
    """Names in ranks: a rank is asked only if all replicas of the ranks before it are full.

    A session waits for its replica. A prompt prefers the replica that got its beginning, else the one that its hash
    names, which is the same for every router; a replica that is much busier than others is passed over. sent: by key,
    the replica that last got it. avoid: replicas that have just failed, taken only if there is no other.
    """
    usable = {each.name: each for each in candidates if each.name not in avoid} or {c.name: c for c in candidates}
    if not usable or not request.keys:
        return [list(usable)] if usable else []
    home = sent.get(request.session or "")
    if home in usable:
        return [[home]]
    for key, border in reversed(list(zip(request.prefix, BORDERS, strict=False))):
        best = usable.get(sent.get(key, ""))
        if best is not None and border * MIN_SHARE >= request.size:
            break
    else:  # rendezvous hashing: when a replica comes or goes, only its own keys move
        own = request.session or request.prefix[-1]
        best = max(usable.values(), key=lambda each: hashlib.sha256(f"{own}/{each.name}".encode()).digest())
    quietest = min(usable.values(), key=lambda each: each.load)
    if best.load - quietest.load > max(1, best.capacity // SLACK):
        best = quietest
    rest = [name for name in usable if name != best.name]
    return [[best.name], rest] if rest else [[best.name]]


def _messages(body: dict[str, Any]) -> Iterator[bytes]:
    """Tools come first, as in chat templates."""
    if body.get("tools"):
        yield _plain(body["tools"])
    if body.get("instructions"):
        yield _plain({"role": "system", "content": body["instructions"]})
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    yield from map(_plain, messages if isinstance(messages, list) else ())


def _prompt(prompt: Any) -> Iterator[bytes]:
    """Of several prompts, the first one. A token id counts as four bytes, about as many as a token has of text."""
    if isinstance(prompt, list) and prompt and not _is_id(prompt[0]):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt[: BORDERS[-1]].encode("utf-8", "surrogatepass")
    elif isinstance(prompt, list):
        yield b"".join(struct.pack("<q", each)[:4] for each in takewhile(_is_id, prompt[: BORDERS[-1] // 4]))


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
