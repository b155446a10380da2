"""The DRAM tier of a cache: full blocks, written through as soon as they are full, and the memories they lie in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coattn.cache.block_table import BlockGeneration, BlockTable
from coattn.cache.blocks import BlockMemory, runs
from coattn.cache.host_memory import CopyStream
from coattn.cache.ledger import Ledger
from coattn.cache.observer import KeySource
from coattn.cache.spec import CacheSpec
from coattn.kernels.quantise.values import ValueBlocks, block_bytes, pack_values
from coattn.types import LayerShape


class HostTier:
    """Block b of sequence s lies at `table.owned[s][b]` from the moment it is full."""

    def __init__(self, block: int, spec: CacheSpec, memory: BlockMemory, keys: KeySource | None) -> None:
        """keys: where memory has values alone."""
        self.block, self.spec, self.memory, self.keys = block, spec, memory, keys
        self.table = BlockTable(memory)
        self._copies = CopyStream()

    @property
    def unit(self) -> float:
        """Bytes of DRAM for a block: its own, and what maintenance may take for it."""
        return self.memory.block_bytes * (1 + self.spec.plan.host_overhead)

    def open(self) -> None:
        spec = self.spec
        blocks = (spec.tokens or 0) // self.block
        self.table.tabulate(spec.seqs + 1, max(1, blocks))
        if spec.fixed:
            room, wanted = spec.ledger.room("host"), spec.seqs * blocks
            self.memory.fix(wanted if room is None else min(wanted, self._fit(room, blocks)))
        elif spec.tokens is not None:
            self.memory.reserve(spec.seqs * blocks)

    def _fit(self, room: int, longest: int) -> int:
        """Blocks that so many bytes hold, with room for one prompt that is being read, of at most `longest` blocks."""
        prompt = self.spec.prompt_token_bytes * self.block
        blocks = int(room / (self.unit + prompt))
        return blocks if blocks <= longest else int((room - longest * prompt) / self.unit)

    def generations(self, slot: int, blocks: int) -> list[BlockGeneration]:
        """Of a sequence's first blocks, where copies of them may be kept: what is rounded has no exact copy."""
        return self.table.generations(slot, blocks) if self.memory.form == "model" else []

    def read(self, layer: int, slot: int, blocks: range) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of full blocks of a sequence, on the layer's device."""
        memory, shape = self.memory, self.spec.layers[layer]
        memory.wait_writes()
        wanted = self.table.owned.get(slot, [])[blocks.start : blocks.stop]
        if self.keys is None:
            both = memory.brought(layer, wanted)
            keys, values = both[:, :, 0], both[:, :, 1]
        else:
            ids = torch.tensor(wanted, dtype=torch.long)
            keys = self.keys.keys(layer, ids)
            values = memory.values(layer).read(ids, shape.dtype).to(shape.device)
        k, v = (x.transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim) for x in (keys, values))
        return k, v

    def write(self, layer: int, ids: list[int], k: Tensor, v: Tensor) -> None:
        """Whole blocks of k, v `[len(ids) * block, kv_heads, d]`.

        From a GPU on a stream of its own; `wait_writes` of the memory waits for them, pulls for their layer.
        """
        memory, made = self.memory[layer], self.memory.pack(k, v)
        self.memory.note_scales(layer, ids, made)
        if made.device.type != "cuda":
            memory[torch.tensor(ids)] = made.to(memory.device, memory.dtype)
            return

        def copy(blocks: Tensor) -> None:
            for start, end in runs(ids):
                memory[ids[start] : ids[end - 1] + 1].copy_(blocks[start:end], non_blocking=True)

        self.memory.arriving[layer] = self._copies.start(made.to(memory.dtype), copy)


def host_blocks(config: Any, spec: CacheSpec, side: BlockMemory | None) -> BlockMemory:
    """As a CacheConfig with a DRAM tier says. side: what an index keeps of every block, in the GPU tier."""
    given = spec.layers, config.block, spec.ledger
    if config.host == "v":
        return ValueMemory("host", *given, "Keeping every value", config.host_dtype, side)
    scales = None
    if config.host_dtype != "model" and spec.plan.scales_on_gpu:
        scales = ScaleMemory(*given)
        if side is None:
            side = scales
        else:
            side.side = scales
    memory = BlockMemory("host", *given, "Keeping every token", config.host_dtype, side)
    memory.scales = scales
    return memory


class ValueMemory(BlockMemory):
    """Values in DRAM: `[blocks, kv_heads, block, head_dim]`, or in few bits `[blocks, kv_heads, bytes]`."""

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        if self.form == "model":
            return (blocks, shape.kv_heads, self.block, shape.head_dim)
        return (blocks, shape.kv_heads, block_bytes(self.form, self.block, shape.head_dim))

    def values(self, layer: int) -> ValueBlocks:
        return ValueBlocks(self[layer], self.form, self.block, self.layers[layer].head_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        made = v.reshape(-1, self.block, *v.shape[1:]).transpose(1, 2)
        return made if self.form == "model" else pack_values(made, self.form)


class ScaleMemory(BlockMemory):
    """Scales and minima of blocks in 8 bits, in GPU memory: of single entries only their codes cross PCIe then.

    Of every block in DRAM `[kv_heads, 2 * (head_dim + block)]` float16, in the order of `quantise/blocks.py`.
    A block's keys share a scale and a minimum for each channel: 512 bytes at head size 128, more than an entry's codes.
    Owner: the cache. Writers: whatever writes blocks: `append`,
    `HostTier.write`, and `replace` of blocks that come from a file. Readers: kernels that fetch entries.
    """

    def __init__(self, layers: Mapping[int, LayerShape], block: int, ledger: Ledger) -> None:
        super().__init__("gpu", layers, block, ledger, "Scales of what lies in DRAM in 8 bits")

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        return (blocks, shape.kv_heads, 2 * (shape.head_dim + self.block))

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return torch.float16


def scale_bytes(block: int, shape: LayerShape) -> int:
    """Bytes of the scales and minima of one block of a layer."""
    return 4 * shape.kv_heads * (shape.head_dim + block)
