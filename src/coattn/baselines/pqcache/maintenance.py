"""Codebooks of a prompt's own keys, made before the first decode step after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from coattn.parts.maintenance.base import Maintenance
from coattn.parts.maintenance.weighing import stored_keys
from coattn.types import Phase, Step

if TYPE_CHECKING:
    from coattn.baselines.pqcache.index import PromptCodes
    from coattn.baselines.pqcache.select import CodeTop


@dataclass
class PromptBooks(Maintenance):
    """Clusters all keys of a sequence when a prompt or a turn has been read, and codes them anew."""

    name = "prompt_books"
    needs = frozenset({"prompt_codes", "whole_kv"})
    provides = frozenset({"prompt_books"})
    resumes = True

    _read: set[int] = field(init=False, repr=False, default_factory=set)
    """Sequences that have read something since their codebooks were made."""

    def plan(self, step: Step) -> None:
        if step.phase is not Phase.DECODE:
            self._read.update(slot for slot, new in zip(step.slots, step.new, strict=True) if new)
            return
        for slot, history in zip(step.slots, step.history, strict=True):
            if slot in self._read and history:
                self._fit(slot, history)

    def release(self) -> None:
        self._read.clear()

    def _fit(self, slot: int, length: int) -> None:
        index, cache = cast("PromptCodes", self.index), self.cache
        assert cache.host is not None
        ids = cache.host.table.owned.get(slot, [])[: length // cache.block]
        sinks = getattr(cast("CodeTop", self.select), "sinks", 0)
        for layer in cache.spec.layers:
            index.fit(layer, slot, stored_keys(cache, layer, slot, length), sinks, ids)
        index.prompt[slot] = length
        self._read.discard(slot)
