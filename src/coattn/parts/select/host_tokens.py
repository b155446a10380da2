"""Single tokens in DRAM, chosen per KV head by a score: what the rules share that let the GPU fetch them."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import BlockList, Selection, Step


@dataclass
class HostTokens(Select):
    """Base of rules that attend to all that lies on the GPU, and for each KV head to some tokens in DRAM.

    Prompts and turns attend to everything.
    """

    needs = frozenset({"host", "whole_kv", "pull"})
    capturable = True

    dense_layers: int = 0
    _taken: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[rows]` float32: tokens in DRAM that the last decode step attended to, the mean over KV heads."""

    def __post_init__(self) -> None:
        check_count("dense_layers", self.dense_layers, 0)

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        for layer, shape in cache.spec.layers.items():
            self._taken[layer] = torch.zeros(cache.spec.seqs, device=shape.device)

    def is_exact(self) -> bool:
        return False

    @abstractmethod
    def choose(self, call: AttentionCall, table: StepTable, gpu: BlockList, host: BlockList) -> tuple[Tensor, Tensor]:
        """What a decode step attends to in DRAM: positions `[rows, kv_heads, k]` int64, and how many of them count,
        `[rows, kv_heads]`."""

    def pick(self, call: AttentionCall) -> Selection:
        visible = call.visible
        gpu, host = visible.gpu, visible.host
        if call.table is None or host is None or call.layer < self.dense_layers:
            return visible
        assert gpu is not None, "a decode step sees its own token"
        chosen, count = self.choose(call, call.table, gpu, host)
        self._taken[call.layer][: len(count)] = count.float().mean(1)
        return Selection.of(gpu, list_tokens(host, self.cache.dram.memory[call.layer], chosen, count))

    def report(self, step: Step) -> dict[str, Any]:
        there = sum(self.cache.gpu.first(length) * self.cache.block for length in step.lengths)
        if not there or not step.seqs:
            return {}
        attended = 0.0
        for layer, taken in self._taken.items():
            attended += there if layer < self.dense_layers else float(taken[: step.seqs].sum())
        return {"attended_host": attended / len(self._taken)}

    def release(self) -> None:
        self._taken.clear()


def token_memory(memory: Tensor) -> Tensor:
    """Blocks `[n, kv_heads, 2, block, d]` as blocks of one token: a view, `[places, kv_heads, 2, 1, d]`.

    Row r of block b lies at place `b * 2 * kv_heads * block + r` of every head; most places are no token's.
    """
    n, heads, _, block, d = memory.shape
    places = max(0, n - 1) * 2 * heads * block + (block if n else 0)
    return memory.as_strided((places, heads, 2, 1, d), (d, 2 * block * d, block * d, d, 1), memory.storage_offset())


def list_tokens(host: BlockList, memory: Tensor, chosen: Tensor, count: Tensor) -> BlockList:
    """Single tokens for each KV head, out of host blocks that all heads share. Tensors only.

    chosen: positions `[seqs, kv_heads, k]`; count: how many of them count, `[seqs, kv_heads]`.
    """
    heads, block = memory.shape[1], memory.shape[3]
    ids = host.table.expand(-1, heads, -1).gather(2, (chosen // block).clamp(max=host.table.shape[-1] - 1)).long()
    table = (ids * (2 * heads * block) + chosen % block).to(torch.int32)
    return BlockList(table.contiguous(), count.to(torch.int32).contiguous(), chosen.shape[-1], token_memory(memory))
