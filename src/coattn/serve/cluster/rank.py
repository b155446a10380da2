"""Replicas in order of preference for a request: which has its KV, and which is not too busy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coattn.serve.cluster.affinity import BORDERS, Affinity

MIN_SHARE = 4
"""A known beginning counts if it is at least one part in so many of the prompt."""
SLACK = 4
"""A replica is too busy for a new prompt if it has capacity / SLACK more requests than the quietest one."""


@dataclass(frozen=True)
class Candidate:
    """A replica as its router knows it. load: requests that it has; capacity: those that it may have."""

    name: str
    load: int
    capacity: int


def rank(
    request: Affinity, candidates: Sequence[Candidate], sent: Mapping[str, str], avoid: Iterable[str] = ()
) -> list[list[str]]:
    """Names in ranks: a rank is asked only if all replicas of the ranks before it are full.

    A session waits for its replica. A prompt prefers the replica that got its beginning, else the one that its hash
    names, which is the same for every router; a replica that is much busier than others is passed over. sent: by key,
    the replica that last got it. avoid: replicas that have just failed, taken only if there is no other.
    """
    failed = set(avoid)
    usable = [each for each in candidates if each.name not in failed] or list(candidates)
    if not usable or not request.keys:
        return [[each.name for each in usable]] if usable else []
    by_name = {each.name: each for each in usable}
    home = sent.get(request.session or "")
    if home in by_name:
        return [[home]]
    own = request.session or request.prefix[-1]
    best = by_name.get(_prefix_home(request, by_name, sent)) or max(usable, key=lambda each: _weight(own, each.name))
    quietest = min(usable, key=lambda each: (each.load, each.name != best.name))
    if best.load - quietest.load > max(1, best.capacity // SLACK):
        best = quietest
    rest = [each.name for each in usable if each is not best]
    return [[best.name], rest] if rest else [[best.name]]


def _prefix_home(request: Affinity, usable: Iterable[str], sent: Mapping[str, str]) -> str:
    """The replica that got the longest beginning, if that is a large enough share of the prompt."""
    for key, border in reversed(list(zip(request.prefix, BORDERS, strict=False))):
        name = sent.get(key, "")
        if border * MIN_SHARE >= request.size and name in usable:
            return name
    return ""


def _weight(key: str, name: str) -> bytes:
    """Rendezvous hashing: when a replica comes or goes, only its own keys move."""
    return hashlib.sha256(f"{key}/{name}".encode()).digest()
