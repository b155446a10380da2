"""A double-buffered stretch of GPU memory that blocks in DRAM pass through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory, runs
from coattn.cache.ledger import Ledger
from coattn.kernels.recall import recall
from coattn.types import LayerShape

HALVES = 2


@dataclass
class Staging:
    """Two halves per device, filled and attended in turn.

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
    _halves: dict[torch.device, Tensor] = field(default_factory=dict)
    _turn: dict[torch.device, int] = field(default_factory=dict)
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)
    _free: dict[tuple[torch.device, int], torch.cuda.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape = next(iter(self.layers.values()))
        self.devices = {shape.device for shape in self.layers.values()}
        self.unit = self.unit_bytes(self.layers, self.block)

    @staticmethod
    def unit_bytes(layers: Mapping[int, LayerShape], block: int) -> int:
        """Bytes that one more block per half costs."""
        shapes = layers.values()
        return HALVES * len({s.device for s in shapes}) * block * max(s.token_bytes for s in shapes)

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
            for device in self.devices:
                self._make(device)
        except BaseException:
            self.release()
            raise

    def _make(self, device: torch.device) -> None:
        size = (HALVES, self.blocks, self.shape.kv_heads, 2, self.block, self.shape.head_dim)
        self._halves[device] = torch.zeros(size, dtype=self.shape.dtype, device=device)
        if device.type == "cuda":
            # the zeros are written on the current stream: copies on the side stream come after them, and the
            # memory is not given to others while such a copy may still be on its way
            self._halves[device].record_stream(self._stream(device))
            for half in range(HALVES):
                self._mark_free(device, half)

    def release(self) -> None:
        self.ledger.give("gpu", self.blocks * self.unit)
        self.blocks = 0
        self._halves.clear()
        self._free.clear()

    def fill(self, layer: int, host: BlockMemory, ids: list[int]) -> Filling:
        """Starts copying blocks `ids` of the layer into the half whose turn it is; they lie there in this order."""
        device = self.layers[layer].device
        half = self._turn.get(device, 0)
        self._turn[device] = 1 - half
        target = self._halves[device][half]
        if device.type != "cuda":
            _copy(target, host, layer, ids)
            return Filling(self, device, half, target, None)
        stream = self._stream(device)
        stream.wait_event(self._free[device, half])
        if layer in host.arriving:
            stream.wait_event(host.arriving[layer])
        with torch.cuda.stream(stream):
            _copy(target, host, layer, ids)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(stream)
        return Filling(self, device, half, target, ready)

    def done(self, filling: Filling) -> None:
        """The attention over this half has been launched on the current stream."""
        if filling.ready is not None:
            self._mark_free(filling.device, filling.half)

    def _mark_free(self, device: torch.device, half: int) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._free[device, half] = event

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


@dataclass
class Filling:
    """A half on its way in."""

    staging: Staging
    device: torch.device
    half: int
    blocks: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The staged blocks, safe to read on the current stream."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)
        return self.blocks


def _copy(target: Tensor, host: BlockMemory, layer: int, ids: list[int]) -> None:
    source = host[layer]
    if host.form != "model":
        # a kernel reads them where they lie and writes numbers, in the order of `target`
        wanted = torch.tensor(ids, dtype=torch.int32).to(target.device)
        places = torch.arange(len(ids), dtype=torch.int32, device=target.device)
        recall(target, host.listed(layer), *(x.expand(1, target.shape[1], -1) for x in (places, wanted)))
        return
    for start, end in runs(ids):
        target[start:end].copy_(source[ids[start] : ids[end - 1] + 1], non_blocking=True)
