"""The GPU over PCIe and the CPU in DRAM, each for a part of the chosen entries; who is faster gets more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.call import Call
from coattn.execute.base import Result, State
from coattn.execute.cpu import Cpu
from coattn.execute.pull import Pull
from coattn.handover.base import Hand
from coattn.ops.attend_scored import Chosen, attend_scored
from coattn.ops.deal import deal
from coattn.ops.merge import merge_states
from coattn.part import check_count
from coattn.types import BlockWork, EntryWork, ScoredWork, Step

MOST = 512
"""Entries a KV head that the CPU is given at most in a step; the GPU fetches what is more."""
EVERY = 8
"""Decode steps between two looks at who was waited for."""
NEARLY = 0.05
"""Times that differ by no more are called equal."""


@dataclass
class Split(Pull):
    """Of the entries chosen in DRAM the GPU fetches some, the CPU attends to the others meanwhile; both exactly.

    How many the GPU fetches follows what is measured: where it waited for the CPU it takes more, where the CPU was
    done first, fewer. Each layer has its own number.
    """

    name = "split"
    runs = frozenset({"host", "scored"})
    provides = frozenset({"pull", "cpu"})
    help_text = {
        "fetch": "entries a KV head that the GPU fetches itself at first; the CPU attends to the others, up to 512",
        "balance": "let the share of each follow who was waited for",
    }

    fetch: int = 64
    balance: bool = True
    _cpu: Cpu = field(init=False, repr=False, default_factory=Cpu)
    _stay: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer, on its device: entries a KV head that the GPU fetches."""
    _numbers: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """The same, as they were last set."""
    _hand: Hand | None = field(init=False, repr=False, default=None)
    _given: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer: the lengths of the lists that the CPU had in the last step that was not captured."""
    _steps: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_count("fetch", self.fetch, 0)

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        self._cpu.cache = cache
        self._numbers = dict.fromkeys(cache.spec.layers, self.fetch)
        device = cache.spec.device
        self._stay = {x: torch.tensor([self.fetch], dtype=torch.int32, device=device) for x in self._numbers}

    def run(self, call: Call, work: BlockWork | ScoredWork) -> State:
        if not isinstance(work, ScoredWork) or call.table is None:
            return super().run(call, work)
        assert self.cache.host is not None
        memory, cap, hand = self.cache.host.memory[call.layer], call.shape.softcap, call.table.hand
        asked: list[Result] = []

        def share(chosen: Chosen) -> None:
            index, count = hand.room(call, memory, chosen, MOST)
            deal(chosen, self._stay[call.layer], index, count)
            table = call.table
            assert table is not None
            self._given[call.layer] = count
            asked.append(hand.ask(self._cpu, call, EntryWork(table.memory.host("host_blocks"), index, count)))

        found = attend_scored(call.q, memory, work, call.scale, cap, share)
        self._taken[call.layer], self._hand = found.count, hand
        return merge_states([found.states, *(fetch() for fetch in asked)])

    def commit(self, step: Step) -> None:
        self._steps += 1
        if not self.balance or self._hand is None or self._steps % EVERY:
            return
        for layer, (own, other) in self._hand.times().items():
            now = self._numbers[layer]
            if other > own * (1 + NEARLY):
                now = min(now + now // 4 + 4, MOST)
            elif other < own * (1 - NEARLY):
                now = max(now - now // 8 - 2, 0)
            if now != self._numbers[layer]:
                self._numbers[layer] = now
                self._stay[layer].fill_(now)

    def report(self, step: Step) -> dict[str, Any]:
        found = super().report(step)
        given = [float(count[: step.seqs].sum()) / count.shape[1] for count in self._given.values()]
        if "row_entries" in found and given:
            mean = sum(given) / len(given)
            found |= {"row_entries": found["row_entries"] + mean, "cpu_entries": mean}
            found["fetched_at_most"] = sum(self._numbers.values()) / len(self._numbers)
        return found
