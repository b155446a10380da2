"""Block memory: the one storage primitive. A cache is index arithmetic over it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coattn.cache import available
from coattn.cache.host_memory import host_memory, layer_views
from coattn.cache.ledger import PLACE, Ledger
from coattn.errors import BudgetError
from coattn.kernels.append import whole_blocks
from coattn.kernels.quantise.blocks import Layout, PackedBlocks, pack_blocks, scales_of
from coattn.kernels.quantise.tokens import TokenBlocks
from coattn.kernels.quantise.values import ValueBlocks
from coattn.kernels.recall import recall
from coattn.kernels.streams import current
from coattn.kernels.upload import upload
from coattn.types import LayerShape, Tier
from coattn.units import format_bytes

NO_MEMORY = ("allocate", "overflow")
"""Words of PyTorch's errors for tensors that are too large."""


class BlockMemory:
    """Blocks of one tier for a group of layers. Block id i means the i-th block of every layer's tensor.

    Layout of a layer's tensor: `[blocks, kv_heads, 2, block, head_dim]`, i.e. for one block and KV head the K rows,
    then the V rows, contiguous: one streaming read for the CPU, one burst for a pulling GPU. In 8 bits (`form`):
    `[blocks, kv_heads, bytes]`, see `quantise/blocks.py`.

    A memory may have a side: block i of the side belongs to block i, and both grow together. A side may have one, too.

    Owner: the cache that made it. Writers: its `append`, maintenance in pools, `replace`. Readers: rules and executors.
    A block may be overwritten once the step that attends to it has returned; decode steps run one after another.
    """

    def __init__(
        self,
        tier: Tier,
        layers: Mapping[int, LayerShape],
        block: int,
        ledger: Ledger,
        what: str,
        form: str = "model",
        side: BlockMemory | None = None,
        padding: int = 0,
    ) -> None:
        """form: element type, `model` or `int8`. side: what an index keeps of every block in the GPU tier.

        padding: as a side, blocks after the last, for the padding rows of a step.
        """
        self.tier, self.layers, self.block, self.ledger, self.what = tier, layers, block, ledger, what
        self.form, self.side, self.padding = form, side, padding
        self.block_bytes = sum(map(self.layer_bytes, layers.values()))
        self.scales: BlockMemory | None = None
        """Of blocks in 8 bits: their scales and minima in GPU memory too, `[blocks, kv_heads, 2 * (head_dim + block)]`
        float16; the side, or the side's. Kernels that fetch single entries read them there."""
        self.capacity = 0
        self.fixed = False
        """Whether the capacity is final, so that addresses never change."""
        self.arriving: dict[int, torch.cuda.Event] = {}
        """Layers of a host memory that a GPU is still writing to; who reads on another stream waits for the event."""
        self._tensors = self._allocate(0, layers)

    def layer_bytes(self, shape: LayerShape) -> int:
        """Bytes of one block of a layer."""
        return math.prod(self.size(1, shape)) * self.dtype(shape).itemsize

    def size(self, blocks: int, shape: LayerShape) -> tuple[int, ...]:
        """Shape of a layer's tensor of so many blocks; memories of another layout say otherwise, here and below."""
        if self.form != "model":
            return (blocks, shape.kv_heads, Layout(self.block, shape.head_dim).bytes)
        return (blocks, shape.kv_heads, 2, self.block, shape.head_dim)

    def dtype(self, shape: LayerShape) -> torch.dtype:
        return shape.dtype if self.form == "model" else torch.uint8

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Whole blocks of k, v `[n * block, kv_heads, d]`, as they are stored."""
        blocks = whole_blocks(k, v, self.block)
        return blocks if self.form == "model" else pack_blocks(blocks)

    def rows(self, layer: int) -> Tensor | TokenBlocks:
        """What kernels write single tokens to, and attend where they lie in GPU memory."""
        return self[layer]

    def values(self, layer: int) -> ValueBlocks:
        """The values of a layer, where they can be read one by one."""
        return ValueBlocks.of(self[layer][:, :, 1])

    def brought(self, layer: int, ids: list[int]) -> Tensor:
        """Blocks `[len(ids), kv_heads, 2, block, head_dim]` in the layer's dtype, on its device."""
        shape = self.layers[layer]
        size = (len(ids), shape.kv_heads, 2, self.block, shape.head_dim)
        blocks = torch.empty(size, dtype=shape.dtype, device=shape.device)
        with current(shape.device):
            self.bring(layer, ids, blocks)
        return blocks

    def bring(self, layer: int, ids: list[int], to: Tensor) -> None:
        """The same into the first places of `to`. A GPU copies stretches of blocks as they lie, on its current stream:
        gathered on the host first, they would take many times as long."""
        if self.form != "model":  # a kernel reads codes where they lie and writes numbers
            wanted = torch.tensor(ids, dtype=torch.int32).to(to.device)
            places = torch.arange(len(ids), dtype=torch.int32, device=to.device)
            recall(to, self.listed(layer), *(x.expand(1, to.shape[1], -1) for x in (places, wanted)))
            return
        memory = self[layer]
        for start, end in runs(ids):
            to[start:end].copy_(memory[ids[start] : ids[end - 1] + 1], non_blocking=True)

    def listed(self, layer: int) -> Tensor | PackedBlocks:
        """What attention over listed blocks reads."""
        memory = self[layer]
        if self.form == "model":
            return memory
        near = None if self.scales is None else self.scales[layer]
        return PackedBlocks(memory, self.block, self.layers[layer].head_dim, near)

    def note_scales(self, layer: int, ids: Sequence[int], packed: Tensor | None = None) -> None:
        """Scales and minima of blocks that were written come into GPU memory. packed: those; else they are read."""
        if self.scales is None or not ids:
            return
        shape, to, own = self.layers[layer], self.scales[layer], torch.tensor(ids, dtype=torch.long)
        scales = scales_of(self[layer] if packed is None else packed, self.block, shape.head_dim)
        to[upload(own, to.device)] = (scales[own] if packed is None else scales).to(to.device)

    def contents(self, ids: Sequence[int]) -> dict[int, Tensor]:
        """By layer: blocks as they are stored, on the host."""
        self.wait_writes()
        wanted = torch.tensor(ids, dtype=torch.long)
        return {i: self[i][wanted.to(self[i].device)].cpu().contiguous() for i in self.layers}

    def replace(self, ids: Sequence[int], contents: Mapping[int, Tensor]) -> None:
        """Blocks are from now on what `contents` said."""
        wanted = torch.tensor(ids, dtype=torch.long)
        for layer in self.layers:
            memory = self[layer]
            memory[wanted.to(memory.device)] = contents[layer].to(memory.device)
            self.note_scales(layer, ids)

    def wait_writes(self) -> None:
        """Waits until what GPUs have written has arrived."""
        for event in self.arriving.values():
            event.synchronize()
        self.arriving.clear()

    def __getitem__(self, layer: int) -> Tensor:
        return self._tensors[layer]

    @property
    def bytes(self) -> int:
        return self.capacity * self.block_bytes

    def room(self) -> int | None:
        """Blocks by which the capacity could grow; None: no limit."""
        if self.fixed:
            return 0
        left = self.ledger.left(self.tier)
        # without a GPU, sides of blocks in DRAM come out of the same memory
        more = self.side_bytes if self.tier == "host" and self.ledger.limit("host") is None else 0
        own = None if left is None else left // (self.block_bytes + more)
        on_gpu = None if self.side is None else self.ledger.left("gpu")
        if on_gpu is None:
            return own
        sides = max(0, on_gpu - self._side_padding()) // self._gpu_bytes()
        return sides if own is None else min(own, sides)

    def require(self, blocks: int) -> None:
        """Raises BudgetError when a capacity of `blocks` would not fit."""
        if self.fixed and blocks > self.capacity:
            self.ledger.refuse(self.tier, (blocks - self.capacity) * self.block_bytes, self.what)
        more = max(0, blocks - self.capacity)
        self.ledger.require(self.tier, more * self.block_bytes, self.what)
        if self.side is not None and more:
            self.ledger.require("gpu", more * self._gpu_bytes() + self._side_padding(), self.side.what)

    def _gpu_bytes(self) -> int:
        """Bytes of the GPU tier that a block takes, its side included."""
        return self.side_bytes + (self.block_bytes if self.tier == "gpu" else 0)

    @property
    def side_bytes(self) -> int:
        """Bytes of the GPU tier that a block takes in its side, and in the side's."""
        return 0 if self.side is None else self.side.block_bytes + self.side.side_bytes

    def _side_padding(self) -> int:
        """Bytes of the side's padding, as long as it has not been taken."""
        return 0 if self.side is None or self.capacity else self.side.padding * self.side_bytes

    def reserve(self, blocks: int) -> None:
        """Grows to at least `blocks` blocks, keeping what is stored. By half at a time where the budget allows."""
        if blocks <= self.capacity:
            return
        self.require(blocks)
        room = self.room()
        generous = max(blocks, self.capacity + self.capacity // 2)
        if room is not None:
            generous = min(generous, self.capacity + room)
        self._resize(max(blocks, generous))

    def fix(self, blocks: int) -> None:
        """Takes `blocks` blocks, or what the budget allows, once and for all."""
        room = self.room()
        self._resize(blocks if room is None else min(blocks, room))
        self.fixed = True

    def release(self) -> None:
        self._resize(0)
        self.fixed = False

    def _resize(self, capacity: int) -> None:
        """Makes one layer after the other anew: until a layer is copied, its old tensor takes bytes that the ledger
        does not count. DRAM that a GPU reads is one stretch, and all of it lies there twice."""
        added, had = (capacity - self.capacity) * self.block_bytes, self.capacity
        keep = min(capacity, had)
        apart = self.tier == "gpu" or self._device().type != "cuda"
        pieces = [{i: shape} for i, shape in self.layers.items()] if apart else [dict(self.layers)]
        if added > 0:
            again = max(sum(map(self.layer_bytes, piece.values())) for piece in pieces)
            self._check_available(added + had * again)
            self.ledger.take(self.tier, added, self.what)
        try:
            for piece in pieces:
                fresh = self._allocate(capacity, piece)
                for i in piece if keep else ():
                    fresh[i][:keep] = self._tensors[i][:keep]
                self._tensors |= fresh
        except BaseException:
            if added > 0:
                self.ledger.give(self.tier, added)
            self._tensors = {i: x if len(x) <= had else x[:had].clone() for i, x in self._tensors.items()}
            raise
        if added < 0:
            self.ledger.give(self.tier, -added)
        self.capacity = capacity
        if self.side is not None:
            self.side._resize(capacity + self.side.padding if capacity else 0)

    def _device(self) -> torch.device:
        """The first that is not the CPU; else that."""
        return next((s.device for s in self.layers.values() if s.device.type != "cpu"), torch.device("cpu"))

    def _check_available(self, nbytes: int) -> None:
        """Raises BudgetError where the machine's DRAM has not so much left."""
        devices = {shape.device.type for shape in self.layers.values()}
        # a budget that was given is believed: machines exist whose memory grows as it is used
        unsaid = self.ledger.limit(self.tier) is None and (self.ledger.whole or self.ledger).dram is None
        if unsaid and "meta" not in devices and (self.tier == "host" or "cuda" not in devices):
            available.require(nbytes, self.what, PLACE[self.tier])

    def _allocate(self, blocks: int, layers: Mapping[int, LayerShape]) -> dict[int, Tensor]:
        nbytes, device = blocks * sum(map(self.layer_bytes, layers.values())), self._device()
        try:
            if self.tier == "gpu" and device.type == "cuda":
                # zeroed: a padded row of a half-filled block may be multiplied by a weight of zero, and 0 * nan is nan
                sizes = {i: self.size(blocks, s) for i, s in layers.items()}
                return {i: torch.zeros(sizes[i], dtype=self.dtype(s), device=s.device) for i, s in layers.items()}
            # layers that are made together lie in one stretch of memory; a GPU of any layer makes it readable by GPUs
            views = {i: (self.dtype(s), self.size(blocks, s)) for i, s in layers.items()}
            return layer_views(host_memory(nbytes, device), views)
        except (RuntimeError, OSError) as error:  # on the host there is no other for memory that is not there
            if not isinstance(error, torch.OutOfMemoryError) and not any(w in str(error) for w in NO_MEMORY):
                raise
            raise BudgetError(
                f"{self.what} needs {format_bytes(nbytes)} of KV memory {PLACE[self.tier]}, more than is free on this "
                "machine.",
                "Shorten the context, lower the batch or the window, or set a budget.",
            ) from error


def runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """`(start, end)` of each stretch of consecutive ids: one copy each."""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield start, i
            start = i
