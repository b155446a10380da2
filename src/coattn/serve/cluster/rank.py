"""Replicas in order of preference for a request: who has its KV, who is not too busy."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coattn.serve.cluster.affinity import BORDERS, Affinity

SHARE = 4
"""A stored beginning counts if it is at least one part in so many of the prompt."""
SLACK = 4
"""A replica is too busy for a new prompt if it has more requests than the quietest one by room / SLACK."""


@dataclass(frozen=True)
class Candidate:
    """A replica as its router knows it."""

    name: str
    load: int
    """Requests that it has."""
    room: int
    """Requests that it may have."""
    held: frozenset[str] = frozenset()
    """Keys of what it says it has answered."""


class Memory:
    """Where requests went: key -> name, the most recently used ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.places: OrderedDict[str, str] = OrderedDict()

    def note(self, keys: Iterable[str], name: str) -> None:
        for key in keys:
            self.places[key] = name
            self.places.move_to_end(key)
        while len(self.places) > self.most:
            self.places.popitem(last=False)


def rank(
    asked: Affinity, candidates: Sequence[Candidate], places: Mapping[str, str], avoid: Iterable[str] = ()
) -> list[list[str]]:
    """Names in ranks: one of a later rank is asked only if all before it are full.

    A session waits for the replica that has it. A prompt prefers one that has its beginning, else the one that its hash
    names, which is the same for every router; unless that one is much busier than others. avoid: those that have just
    failed, taken only if there is no other.
    """
    failed = set(avoid)
    usable = [each for each in candidates if each.name not in failed] or list(candidates)
    if not usable or not asked.keys:
        return [[each.name for each in usable]] if usable else []
    home = None if asked.session is None else _holder(asked.session, usable, places)
    if home is not None:
        return [[home.name]]
    best = _by_prefix(asked, usable, places) or max(usable, key=lambda each: _weight(_own(asked), each.name))
    quietest = min(usable, key=lambda each: (each.load, each.name != best.name))
    if best.load - quietest.load > max(1, best.room // SLACK):
        best = quietest
    rest = [each.name for each in usable if each is not best]
    return [[best.name], rest] if rest else [[best.name]]


def _by_prefix(asked: Affinity, usable: Sequence[Candidate], places: Mapping[str, str]) -> Candidate | None:
    for key, border in reversed(list(zip(asked.prefix, BORDERS, strict=False))):
        if border * SHARE < asked.size:
            return None
        found = _holder(key, usable, places)
        if found is not None:
            return found
    return None


def _holder(key: str, usable: Sequence[Candidate], places: Mapping[str, str]) -> Candidate | None:
    """Where this router sent it last, else who says that it has it."""
    sent = places.get(key)
    having = [each for each in usable if each.name == sent] or [each for each in usable if key in each.held]
    return max(having, key=lambda each: _weight(key, each.name), default=None)


def _own(asked: Affinity) -> str:
    return asked.session or asked.prefix[-1]


def _weight(key: str, name: str) -> bytes:
    """Rendezvous hashing: when a replica comes or goes, only its own keys move."""
    return hashlib.sha256(f"{key}/{name}".encode()).digest()
