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
from coattn.ops.attend_scored import Chosen, attend_scored
from coattn.ops.deal import deal
from coattn.part import check_count
from coattn.state import Split
from coattn.types import BlockWork, EntryWork, ScoredWork, Step

MOST = 512
"""Entries a KV head that the CPU is given at most in a step; the GPU fetches what is more."""


@dataclass
class Both(Pull):
    """Of the entries chosen in DRAM the GPU fetches some, the CPU attends to the others meanwhile; both exactly.

    How many the GPU fetches follows what is measured: where it waited for the CPU it takes more, where the CPU was
    done first, fewer. Each layer has its own number.
    """

    name = "both"
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
    _given: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer: the lengths of the lists that the CPU had last."""

    def __post_init__(self) -> None:
        check_count("fetch", self.fetch, 0)

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        self._cpu.cache = cache
        device = cache.spec.device
        self._stay = {x: torch.tensor([self.fetch], dtype=torch.int32, device=device) for x in cache.spec.layers}

    def run(self, call: Call, work: BlockWork | ScoredWork) -> State:
        if not isinstance(work, ScoredWork) or call.table is None or call.on_side:
            return super().run(call, work)
        assert self.cache.host is not None
        memory, table, stay = self.cache.host.memory.listed(call.layer), call.table, self._stay[call.layer]
        asked: list[Result] = []

        def share(chosen: Chosen) -> None:
            index, count = table.hand.room(call, memory, chosen, MOST, (stay, self.fetch) if self.balance else None)
            deal(chosen, stay, index, count)
            self._given[call.layer] = count
            asked.append(table.hand.ask(self._cpu, call, EntryWork(table.memory.host("host_blocks"), index, count)))

        found = attend_scored(call.q, memory, work, call.scale, call.shape.softcap, share, self._lanes)
        self._taken[call.layer] = found.far, found.later, found.cold
        others = [fetch() for fetch in asked]
        # the last piece is that of what nobody attended to
        out = torch.cat([*(state.out for state in others), found.states.out], 1)
        return Split(out, torch.cat([*(state.lse for state in others), found.states.lse], 1))

    def report(self, step: Step) -> dict[str, Any]:
        found = super().report(step)
        given = [float(count[: step.seqs].sum()) / count.shape[1] for count in self._given.values()]
        if "row_entries" in found and given:
            mean = sum(given) / len(given)
            found |= {"row_entries": found["row_entries"] + mean, "cpu_entries": mean}
            found["fetched_at_most"] = sum(int(x) for x in self._stay.values()) / len(self._stay)
        return found
