"""What a request's body says of where its KV may lie: its session, and how its prompt begins."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from coattn.engine.store.keys import digest

BORDERS = tuple(1 << n for n in range(8, 17))
"""A prompt has a key at each of these bytes of text, 256 to 65,536, that it reaches."""
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LENGTH = 16
"""Hexadecimal digits of a key: a collision costs one request a hit, and nothing else."""


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
    text = _beginning(_prompt(body.get("prompt")) if path == TEXT else _messages(body))
    return Affinity(session, tuple(_keys(salt, text)), len(text))


def _keys(salt: bytes, text: bytes) -> Iterator[str]:
    made, last = hashlib.sha256(digest("prefix", salt)), 0
    for border in BORDERS:
        if border > len(text):
            return
        made.update(text[last:border])
        last = border
        yield made.hexdigest()[:LENGTH]


def _beginning(parts: Iterator[bytes]) -> bytes:
    text = b""
    for part in parts:
        text += part
        if len(text) >= BORDERS[-1]:
            break
    return text[: BORDERS[-1]]


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
        ids = itertools.takewhile(_is_id, prompt[: BORDERS[-1] // 4])
        yield b"".join(struct.pack("<q", each)[:4] for each in ids)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _plain(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"
