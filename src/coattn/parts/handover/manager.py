"""The bridge of captured steps: the kernels of a CUDA graph post to mailboxes, which a C++ thread answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, Result
from coattn.parts.handover.attend_mailbox import AttendMailbox, LayerJob
from coattn.parts.handover.bridges import InlineBridge
from coattn.parts.handover.mailbox import Mailbox
from coattn.parts.handover.span import Span
from coattn.parts.handover.sum_mailbox import SumMailbox
from coattn.parts.handover.thread import MailboxThread
from coattn.types import BlockWork, RowWork, Work


class MailboxBridge(InlineBridge):
    """One mailbox for queries over blocks, one for weighted rows, each made when it is first needed.

    Of one group of layers; a `MailboxManager` has those of all.
    """

    def __init__(self, cache: KVCache, pulls: bool, thread: MailboxThread) -> None:
        """pulls: whether the GPU fetches from DRAM itself, so that nothing is submitted."""
        self.cache, self.device, self.thread = cache, cache.spec.device, thread
        self._attend: AttendMailbox | None = None
        self._sums: SumMailbox | None = None
        self._streams: list[Any] = []
        """Two, for every other layer: while one waits for the CPU's answer, the other makes the next query."""
        layers = len(cache.spec.layers)
        # the second of each pair keeps the stamps on 16 bytes, so that one compiled kernel takes them all
        self._timestamps = torch.zeros(layers, 2, 2, dtype=torch.int64, device=self.device) if pulls else None
        """On the GPU's clock: the layer's attention in GPU memory is done; so is that over PCIe."""

    @property
    def stage(self) -> int:
        return self.cache.spec.shape.stage

    def submit(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        layer, layers, table = call.layer, dict(self.cache.spec.layers), call.table
        assert table is not None
        if isinstance(work, RowWork):
            if self._sums is None:
                max_entries = table.column("host_blocks").shape[-1] * table.block
                self._sums = SumMailbox(table, layers, max_entries, self.device, self.thread)
            sums = self._sums
            assert self.cache.host is not None
            sums.add(layer, self.cache.host.memory.values(layer))
            sums.post(layer, work)
            return lambda: sums.fetch(layer, work)
        assert isinstance(work, BlockWork)
        if self._attend is None:
            self._attend = AttendMailbox(table, layers, self.device, self.thread)
        mailbox, listed = self._attend, work.blocks
        own = listed if listed.memory is not None or listed.table.device.type == "cpu" else None
        blocks: Any = executor
        mailbox.add(LayerJob(layer, call.shape, blocks.blocks(call, listed), call.scale, own))
        mailbox.post(layer, call.q[:, 0], call.on_side)
        return lambda: mailbox.fetch(layer, table.rows)

    @contextmanager
    def side_stream(self, layer: int, hidden: Tensor) -> Iterator[None]:
        if not self._streams:
            self._streams = [torch.cuda.Stream(self.device) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream = self._streams[layer % 2]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        hidden.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def record_event(self) -> Callable[[], None]:
        made: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record()
        return lambda: torch.cuda.current_stream(self.device).wait_event(made)

    def timestamp_slot(self, layer: int, who: str) -> Tensor | None:
        if self._timestamps is not None:
            row = list(self.cache.spec.layers).index(layer)
            return self._timestamps[row, 0 if who == "gpu" else 1, :1]
        return next((box.timestamp_slot(layer) for box in self.mailboxes() if box.knows(layer)), None)

    def mailboxes(self) -> list[Mailbox]:
        """Those that were made."""
        return [box for box in (self._attend, self._sums) if box is not None]

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer."""
        return [span for box in self.mailboxes() for span in box.spans()]

    def fetches(self) -> list[tuple[str, int, int]]:
        """`(name, start, end)` on the GPU's clock: when the GPU only fetched KV over PCIe in the last replay."""
        stamps = [] if self._timestamps is None else self._timestamps[..., 0].tolist()
        return [(f"layer {layer}", *pair) for layer, pair in zip(self.cache.spec.layers, stamps, strict=False)]

    def report(self) -> dict[str, Any]:
        taken = {} if self._sums is None else self._sums.taken()
        return {"row_entries": sum(taken.values()) / len(taken)} if taken else {}


class MailboxManager:
    """The mailboxes of all groups of layers, and the thread behind them.

    Life: `begin` before each replay of a captured step, `finish` after it; `close` when none is replayed any more.
    """

    def __init__(self) -> None:
        self.thread = MailboxThread()
        self.bridges: list[MailboxBridge] = []

    def open(self, cache: KVCache, pulls: bool) -> MailboxBridge:
        """The bridge of one more group."""
        self.bridges.append(MailboxBridge(cache, pulls, self.thread))
        return self.bridges[-1]

    def begin(self, rows: int) -> None:
        """A captured step of so many sequences is about to be replayed."""
        mailboxes = self._mailboxes()
        if mailboxes:
            self.thread.begin(rows)
        for mailbox in mailboxes:
            mailbox.begin()

    def finish(self) -> None:
        """The replay is over on every device. Raises if the CPU's part of it failed."""
        mailboxes = self._mailboxes()
        if mailboxes:
            self.thread.finish(any(mailbox.late for mailbox in mailboxes))

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer."""
        return [span for bridge in self.bridges for span in bridge.spans()]

    def close(self) -> None:
        if not self.thread.close():
            _abandoned.append(self)

    def _mailboxes(self) -> list[Mailbox]:
        return [mailbox for bridge in self.bridges for mailbox in bridge.mailboxes()]


_abandoned: list[MailboxManager] = []
"""Those whose thread may still write to their mailboxes: never freed."""
