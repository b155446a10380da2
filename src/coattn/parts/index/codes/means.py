"""The mean value of a sequence's full blocks: a running sum for each layer, slot and KV head."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.types import LayerShape


class Means:
    """By layer `[seqs + 1, kv_heads, d + 1]` float32: the sum of values, and of how many; the last row is for padding.

    Owner and writer: the index, when a block has become full. Reader: the rule that lets the mean stand in for what is
    left out, from the next step on.
    """

    def __init__(self, layers: Mapping[int, LayerShape], slots: int) -> None:
        self.sums = {i: torch.zeros(slots + 1, s.kv_heads, s.head_dim + 1, device=s.device) for i, s in layers.items()}

    @staticmethod
    def bytes(layers: Mapping[int, LayerShape], slots: int) -> int:
        return sum(4 * (slots + 1) * s.kv_heads * (s.head_dim + 1) for s in layers.values())

    def add(self, layer: int, slot: int, values: Tensor) -> None:
        """values `[tokens, kv_heads, d]` of blocks that are full now."""
        sums = self.sums[layer][slot]
        sums[:, :-1] += values.sum(0, dtype=torch.float32)
        sums[:, -1] += len(values)

    def recount(self, cache: KVCache, slot: int, blocks: int) -> None:
        """From what DRAM holds of a sequence's first `blocks` full blocks, of values alone."""
        host = cache.dram
        host.memory.wait_writes()
        own = torch.tensor(host.table.owned.get(slot, [])[:blocks], dtype=torch.long)
        for layer, shape in cache.spec.layers.items():
            values = host.memory.values(layer).read(own, shape.dtype).to(shape.device)
            self.sums[layer][slot] = 0
            self.add(layer, slot, values.transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim))

    def of(self, layer: int, table: StepTable, shape: LayerShape) -> Tensor:
        """`[seqs, q_heads, d]` float32: for each query head the mean value of its KV head."""
        sums, group = self.sums[layer], shape.q_heads // shape.kv_heads
        if sums.device.type == "cuda":
            from coattn.kernels.triton.flush import mean_values

            return mean_values(sums, table.seq, group)
        own = sums[table.seq.long()]
        return (own[..., :-1] / own[..., -1:].clamp_min(1)).repeat_interleave(group, 1)
