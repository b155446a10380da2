"""The hand-over of captured steps: the kernels of a CUDA graph post to mailboxes, which a C++ server answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.parts.handover.base import Hand
from coattn.parts.handover.box import Box
from coattn.parts.handover.mailbox import LayerJob, Mailbox
from coattn.parts.handover.server import Server
from coattn.parts.handover.span import Span
from coattn.parts.handover.sums import SumBox
from coattn.types import BlockWork, RowWork

if TYPE_CHECKING:
    from coattn.cache.kv import KVCache
    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import Executor, Result
    from coattn.types import Work


class Mailboxes(Hand):
    """One mailbox for queries over blocks, one for weighted rows, made when first wanted.

    Of one group of layers; a `PostOffice` has those of all.
    """

    def __init__(self, cache: KVCache, pulls: bool, server: Server) -> None:
        """pulls: whether the GPU fetches from DRAM itself, so that there is nobody to ask."""
        self.cache, self.device, self.server = cache, cache.spec.device, server
        self._attend: Mailbox | None = None
        self._sums: SumBox | None = None
        self._streams: list[Any] = []
        """Two, for every other layer: while one waits for the CPU's answer, the other makes the next query."""
        layers = len(cache.spec.layers)
        # the second of each pair keeps the stamps on 16 bytes, so that one compiled kernel takes them all
        self._stamps = torch.zeros(layers, 2, 2, dtype=torch.int64, device=self.device) if pulls else None
        """On the GPU's clock: the layer's attention in GPU memory is done; so is that over PCIe."""

    @property
    def section(self) -> int:
        return self.cache.spec.shape.section

    def ask(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        layer, layers, table = call.layer, dict(self.cache.spec.layers), call.table
        assert table is not None
        if isinstance(work, RowWork):
            if self._sums is None:
                most = table.column("host_blocks").shape[-1] * table.block
                self._sums = SumBox(table, layers, most, self.device, self.server)
            sums = self._sums
            assert self.cache.host is not None
            sums.add(layer, self.cache.host.memory.values(layer))
            sums.post(layer, work)
            return lambda: sums.fetch(layer, work)
        assert isinstance(work, BlockWork)
        if self._attend is None:
            self._attend = Mailbox(table, layers, self.device, self.server)
        box, listed = self._attend, work.blocks
        own = listed if listed.memory is not None or listed.table.device.type == "cpu" else None
        blocks: Any = executor
        box.add(LayerJob(layer, call.shape, blocks.blocks(call, listed), call.scale, own))
        box.post(layer, call.q[:, 0], call.on_side)
        return lambda: box.fetch(layer, table.rows)

    @contextmanager
    def side(self, layer: int, hidden: Tensor) -> Iterator[None]:
        if not self._streams:
            self._streams = [torch.cuda.Stream(self.device) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream = self._streams[layer % 2]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        hidden.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> Callable[[], None]:
        made: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record()
        return lambda: torch.cuda.current_stream(self.device).wait_event(made)

    def stamp(self, layer: int, who: str) -> Tensor | None:
        if self._stamps is not None:
            row = list(self.cache.spec.layers).index(layer)
            return self._stamps[row, 0 if who == "gpu" else 1, :1]
        return next((box.stamp(layer) for box in self.boxes() if box.knows(layer)), None)

    def boxes(self) -> list[Box]:
        """Those that were wanted."""
        return [box for box in (self._attend, self._sums) if box is not None]

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer."""
        return [span for box in self.boxes() for span in box.spans()]

    def fetches(self) -> list[tuple[str, int, int]]:
        """`(name, start, end)` on the GPU's clock: when the GPU only fetched KV over PCIe in the last replay."""
        stamps = [] if self._stamps is None else self._stamps[..., 0].tolist()
        return [(f"layer {layer}", *pair) for layer, pair in zip(self.cache.spec.layers, stamps, strict=False)]

    def report(self) -> dict[str, Any]:
        taken = {} if self._sums is None else self._sums.taken()
        return {"row_entries": sum(taken.values()) / len(taken)} if taken else {}


class PostOffice:
    """The mailboxes of all groups of layers, and the server behind them.

    Life: `begin` before each replay of a captured step, `finish` after it; `close` when none is replayed any more.
    """

    def __init__(self) -> None:
        self.server = Server()
        self.hands: list[Mailboxes] = []

    def open(self, cache: KVCache, pulls: bool) -> Mailboxes:
        """The mailboxes of one more group."""
        self.hands.append(Mailboxes(cache, pulls, self.server))
        return self.hands[-1]

    def begin(self, rows: int) -> None:
        """A captured step of so many sequences is about to be replayed."""
        if self._boxes():
            self.server.begin(rows)
        for box in self._boxes():
            box.begin()

    def finish(self) -> None:
        """The replay is over on every device. Raises if the CPU's part of it failed."""
        boxes = self._boxes()
        if boxes:
            self.server.finish(any(box.late for box in boxes))

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer."""
        return [span for hand in self.hands for span in hand.spans()]

    def close(self) -> None:
        if not self.server.close():
            _abandoned.append(self)

    def _boxes(self) -> list[Box]:
        return [box for hand in self.hands for box in hand.boxes()]


_abandoned: list[PostOffice] = []
"""Those whose thread may still write to their mailboxes: never freed."""
