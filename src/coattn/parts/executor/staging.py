"""Double-buffered GPU memory that blocks in DRAM pass through."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.types import LayerShape

HALVES = 2


@dataclass
class Filling:
    """A half on its way in."""

    half: int
    blocks: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The staged blocks, safe to read on the current stream."""
        if self.ready is not None:
            torch.cuda.current_stream(self.blocks.device).wait_event(self.ready)
        return self.blocks


@dataclass
class Staging:
    """Two halves, filled and attended in turn.

    Owner: one Pull. Writer: `fill`, on a side stream where the device is a GPU. Reader: the attention over the tensor
    that `fill` returned. A half may be overwritten once the attention over it is done: `done` records that on the
    reader's stream, and the next `fill` of the half waits for it. `Filling.wait` makes the reader's stream wait for the
    copy. On the host both are immediate.
    """

    layers: Mapping[int, LayerShape]
    ledger: Ledger
    block: int
    blocks: int = 0
    """Blocks per half."""
    _halves: list[Tensor] = field(default_factory=list)
    _turn: int = 0
    _stream: torch.cuda.Stream | None = None
    _free: list[torch.cuda.Event] = field(default_factory=list)
    """By half of a GPU."""

    def __post_init__(self) -> None:
        self.shape = next(iter(self.layers.values()))
        self.unit = self.unit_bytes(self.layers, self.block)

    @staticmethod
    def unit_bytes(layers: Mapping[int, LayerShape], block: int) -> int:
        """Bytes that one more block per half costs."""
        return HALVES * block * max(shape.token_bytes for shape in layers.values())

    def reserve(self, wanted: int) -> None:
        """Grows towards `wanted` blocks per half, as far as the budget allows; at least one. Drops what is staged."""
        if self.blocks and wanted <= self.blocks:
            return
        room = self.ledger.room("gpu")
        target = max(1, wanted, self.blocks + self.blocks // 2)
        if room is not None:
            target = max(1, min(target, self.blocks + room // self.unit))
        if target == self.blocks:
            return
        self.ledger.take("gpu", (target - self.blocks) * self.unit, "Bringing blocks in from DRAM")
        self.blocks = target
        self._halves.clear()  # first: nobody needs what is staged, and both would not be within the budget
        try:
            self._make()
        except BaseException:
            self.release()
            raise

    def _make(self) -> None:
        shape = self.shape
        size = (HALVES, self.blocks, shape.kv_heads, 2, self.block, shape.head_dim)
        memory = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._halves = list(memory.unbind())
        if shape.device.type == "cuda":
            # the zeros are written on the current stream: copies on the side stream come after them, and the
            # memory is not given to others while such a copy may still be on its way
            self._stream = self._stream or torch.cuda.Stream(shape.device)  # type: ignore[no-untyped-call]
            memory.record_stream(self._stream)
            self._free = [self._event() for _ in range(HALVES)]

    def release(self) -> None:
        self.ledger.give("gpu", self.blocks * self.unit)
        self.blocks = 0
        self._halves.clear()
        self._free.clear()

    def fill(self, layer: int, host: BlockMemory, ids: list[int]) -> Filling:
        """Starts copying blocks `ids` of the layer into the half whose turn it is; they lie there in this order."""
        half, self._turn = self._turn, 1 - self._turn
        target, stream = self._halves[half], self._stream
        if stream is None:
            host.bring(layer, ids, target)
            return Filling(half, target, None)
        stream.wait_event(self._free[half])
        if layer in host.arriving:
            stream.wait_event(host.arriving[layer])
        with torch.cuda.stream(stream):
            host.bring(layer, ids, target)
            ready = stream.record_event()
        return Filling(half, target, ready)

    def done(self, filling: Filling) -> None:
        """The attention over this half has been launched on the current stream."""
        if filling.ready is not None:
            self._free[filling.half] = self._event()

    def _event(self) -> Any:
        """What the current stream of the device has been given so far."""
        return torch.cuda.current_stream(self.shape.device).record_event()
