"""Positions counted inside the cache (StreamingLLM): first tokens that stand right before the recent ones.

Between recent tokens and a query the distance in the cache is that in the text. Only the first tokens lie nearer than
their text says: by as many tokens as were dropped. So their keys are kept as they were read, and in each decode step
they are written to their places turned by so many positions.
"""

import torch
from torch import Tensor

from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import TableMemory
from coattn.errors import ConfigError
from coattn.kernels.rotate import rotate


class TurnedSinks:
    """Keys of each sequence's first tokens at their positions in the text.

    Memory: by layer `[seqs + 1, sinks + 1, kv_heads, d]`, in the GPU tier; the last of either is written to by rows
    that are padding and by tokens that are no sinks.
    """

    def __init__(self, spec: CacheSpec, block: int, sinks: int, counted: bool) -> None:
        """counted: whether positions count inside the cache at all; else nothing is kept, and nothing turned."""
        self.counted = counted
        for shape in spec.layers.values() if counted else ():
            if shape.rope is not None and not shape.rope.frequencies:
                raise ConfigError(
                    "This model turns its keys by how long the text is, or in a way that is not known, so positions "
                    "cannot be counted in the cache.",
                    "Set positions=text.",
                )
        self.spec, self.block, self.sinks = spec, block, sinks
        self.layers = {i: shape for i, shape in spec.layers.items() if counted and shape.rope is not None}
        tokens = (spec.seqs + 1) * (sinks + 1)
        self.bytes = tokens * sum(shape.token_bytes // 2 for shape in self.layers.values())
        self.keys: dict[int, Tensor] = {}
        self._frequencies: dict[int, Tensor] = {}

    def open(self) -> None:
        self.spec.ledger.take("gpu", self.bytes, "Keys of the first tokens")
        for i, shape in self.layers.items():
            assert shape.rope is not None
            size = (self.spec.seqs + 1, self.sinks + 1, shape.kv_heads, shape.head_dim)
            self.keys[i] = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            self._frequencies[i] = torch.tensor(shape.rope.frequencies, dtype=torch.float64, device=shape.device)

    def keep(self, layer: int, slot: int, entries: Tensor, k: Tensor) -> None:
        """Entries `[n]` of a sequence, on the host, have keys k `[n, kv_heads, d]`: those of first tokens are kept."""
        if layer in self.keys:
            own = (entries < self.sinks).nonzero()[:, 0]
            self.keys[layer][slot, entries[own].to(k.device)] = k[own.to(k.device)]

    def read(self, layer: int, slot: int, k: Tensor) -> Tensor:
        """Keys `[n, kv_heads, d]` of a sequence, oldest first, with those of the first tokens as they were read."""
        if layer not in self.keys:
            return k
        first = min(self.sinks, len(k))
        return torch.cat([self.keys[layer][slot, :first], k[first:]])

    def turn(self, layer: int, memory: Tensor, k: Tensor, tables: TableMemory, dummy: int) -> None:
        """A decode step's new keys `[rows, kv_heads, d]` are in memory: the first tokens' go where this step sees them.

        Tensors only. Padding rows write to the dummy block.
        """
        if layer not in self.keys:
            return
        rope, keys = self.layers[layer].rope, self.keys[layer]
        assert rope is not None
        names = ("seq", "gpu_lens", "position", "gpu_blocks")
        seq, seen, position, listed = (tables.device_rows(name, len(k)).long() for name in names)
        keys[seq, (seen - 1).clamp(0, self.sinks)] = k
        place = torch.arange(self.sinks, device=k.device)
        gone = position - (seen - 1)
        turned = rotate(keys[seq, : self.sinks], gone[:, None, None], self._frequencies[layer], rope.interleaved)
        ids = torch.where((seq < self.spec.seqs)[:, None], listed[:, place // self.block], dummy)
        memory[ids, :, 0, place % self.block] = turned

    def release(self) -> None:
        if self.keys:
            self.spec.ledger.give("gpu", self.bytes)
            self.keys.clear()
