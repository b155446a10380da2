"""The bridge of captured steps: the kernels of a CUDA graph post to mailboxes, which a C++ thread answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.cache.kv import KVCache
from coattn.cache.step_table import HostBridge
from coattn.errors import WorkerError
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, Result
from coattn.parts.handover.jobs import AttendMailbox, SumMailbox
from coattn.parts.handover.mailbox import DEADLINE_S, Mailbox, MailboxThread, Span
from coattn.types import BlockWork, RowWork, Work

STOP_US = 100_000
"""How long a thread that is not needed any more may take to come back."""


class MailboxBridge(HostBridge):
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
        # the second of each pair keeps the stamps on 16 bytes, so that one compiled kernel takes them all
        self._stamps = torch.zeros(len(cache.spec.layers) if pulls else 0, 2, 2, dtype=torch.int64, device=self.device)
        self._timestamps: dict[int, Tensor] = dict(zip(cache.spec.layers, self._stamps, strict=False))
        """By layer, on the GPU's clock: its attention in GPU memory is done; so is that over PCIe."""

    @property
    def stage(self) -> int:
        return self.cache.spec.shape.stage

    def submit(self, executor: Executor, call: AttentionCall, work: Work) -> Result:
        table, layers = call.table, self.cache.spec.layers
        assert table is not None
        if isinstance(work, RowWork):
            self._sums = self._sums or SumMailbox(table, layers, self.thread)
            return self._sums.submit(call.layer, self.cache.dram.memory.values(call.layer), work)
        assert isinstance(work, BlockWork)
        self._attend = self._attend or AttendMailbox(table, layers, self.thread)
        blocks: Any = executor
        return self._attend.submit(call, blocks.blocks(call, work.blocks), work.blocks)

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
        made: Any = torch.cuda.current_stream().record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(made)

    def timestamp_slot(self, layer: int, who: str) -> Tensor | None:
        if self._timestamps:
            return self._timestamps[layer][0 if who == "gpu" else 1, :1]
        slots = (mailbox.timestamp_slot(layer) for mailbox in self.mailboxes())
        return next((slot for slot in slots if slot is not None), None)

    def mailboxes(self) -> list[Mailbox]:
        return [mailbox for mailbox in (self._attend, self._sums) if mailbox is not None]

    def fetches(self) -> list[tuple[str, int, int]]:
        """`(name, start, end)` on the GPU's clock: when the GPU only fetched KV over PCIe in the last replay."""
        stamps = self._stamps[..., 0].tolist()
        return [(f"layer {layer}", *pair) for layer, pair in zip(self._timestamps, stamps, strict=True)]

    def report(self) -> dict[str, Any]:
        taken = [] if self._sums is None else self._sums.taken()
        return {"row_entries": sum(taken) / len(taken)} if taken else {}


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
        """A captured step of so many sequences is about to be replayed: arms the thread for it."""
        mailboxes = self._mailboxes()
        if mailboxes:
            self.thread.number += 1
            self.thread.server.begin(self.thread.number, rows)
        for mailbox in mailboxes:
            mailbox.begin()

    def finish(self) -> None:
        """The replay is over on every device. Raises WorkerError if the CPU's part is missing; the thread is then of no
        more use."""
        mailboxes = self._mailboxes()
        if not mailboxes:
            return
        late = any(mailbox.late for mailbox in mailboxes)
        if late:
            self.thread.server.call_off()
        reason: str = self.thread.server.finish(STOP_US if late else int(2 * DEADLINE_S * 1e6))
        if late or reason:
            raise WorkerError(
                f"The CPU's part of a step is missing: {reason or 'it came after the deadline'}.",
                "The next step runs with new workers. If the machine is busy with other work, try again later.",
            )

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer."""
        return [span for mailbox in self._mailboxes() for span in mailbox.spans()]

    def close(self) -> None:
        if not self.thread.server.stop(STOP_US):
            native.abandon_pool()
            _abandoned.append(self)

    def _mailboxes(self) -> list[Mailbox]:
        return [mailbox for bridge in self.bridges for mailbox in bridge.mailboxes()]


_abandoned: list[MailboxManager] = []
"""Those whose thread did not come back and may still write to their mailboxes: never freed, their pool is given up."""
