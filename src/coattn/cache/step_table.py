"""The step table: all that a decode step has to know of its sequences, as numbers at fixed addresses.

`plan` on the host writes it; what runs per layer reads tensors of it and decides nothing by a length. So the same code
runs layer by layer or as a CUDA graph, which reads the table anew at every replay.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.types import BlockList, Selection, Tier, Work, nothing_to_wait_for

NO_BLOCK = -1
"""In a column of block ids: no block."""


class TableMemory:
    """Columns of int32 numbers, one row per sequence of a step, on the host and as a copy on the device.

    A column of width 0 is a number that changes with every step; another is a list of so many blocks, written only when
    it changes. Owner and writer: the KV cache of a group of layers, before a step runs.
    Readers: the step's kernels, of the device's copy, and the CPU's workers, of the host's. The host's may be
    overwritten once the step is over and the copy is done. Writing waits for that; nothing else waits for a GPU that is
    steps behind. `upload` starts the copy on the current stream, which the step follows.
    """

    def __init__(self, columns: Mapping[str, int], batch: int, device: torch.device) -> None:
        self.batch, self.device, self.columns = batch, device, dict(columns)
        ordered = sorted(columns.items(), key=lambda item: item[1] > 0)
        self._numbers = [name for name, width in ordered if width == 0]
        self._place: dict[str, tuple[int, int]] = {}
        size = 0
        for name, width in ordered:
            self._place[name] = (size, width)
            size += batch * max(1, width)
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if device.type == "cuda" else self._host
        self._keys: dict[tuple[str, int], object] = {}
        self._changed = True
        self._sent: Any = None
        """On a GPU: the event after which the host's memory has been read."""

    def has(self, name: str) -> bool:
        return name in self._place

    def host(self, name: str) -> Tensor:
        """`[batch, width]` of a list, `[batch]` of a number."""
        return self._column(self._host, name, self.batch)

    def device_rows(self, name: str, rows: int) -> Tensor:
        """The first rows of a column on the device."""
        return self._column(self._device, name, rows)

    def write(self, numbers: Mapping[str, Sequence[int]], otherwise: Mapping[str, int]) -> None:
        """All numbers of a step, by column; the rows after them get what `otherwise` says, or zero."""
        self._await()
        flat: list[int] = []
        for name in self._numbers:
            values = numbers[name]
            flat.extend(values)
            flat.extend([otherwise.get(name, 0)] * (self.batch - len(values)))
        self._host[: len(flat)] = torch.tensor(flat, dtype=torch.int32)

    def set_list(self, name: str, row: int, key: object, ids: Callable[[], Tensor]) -> None:
        """A list of blocks, `ids()`, unless `key` says that it is the one written there before."""
        if self._keys.get((name, row)) == key:
            return
        listed = ids()
        self._await()
        self.host(name)[row, : len(listed)] = listed
        self._keys[name, row] = key
        self._changed = True

    def upload(self) -> None:
        """Starts the copy of what was written to the device: the numbers, and the lists where any has changed."""
        if self._device is not self._host:
            end = len(self._host) if self._changed else len(self._numbers) * self.batch
            self._device[:end].copy_(self._host[:end], non_blocking=True)
            self._sent = torch.cuda.current_stream(self.device).record_event()
        self._changed = False

    def _await(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None

    def _column(self, memory: Tensor, name: str, rows: int) -> Tensor:
        start, width = self._place[name]
        part = memory[start : start + rows * max(1, width)]
        return part if width == 0 else part.view(rows, width)


class HostBridge:
    """How the steps of one group of layers hand work over to the CPU: here, at once.

    `coattn.parts.handover` has others. Executors and calls are parts of higher rooms, so they are not typed here.
    """

    def submit(self, executor: Any, call: Any, work: Work) -> Callable[[], Any]:
        """Begins a piece of work of an asynchronous executor; the result fetches its state."""
        state = executor.run(call, work)
        return lambda: state

    def side_stream(self, layer: int, hidden: Tensor) -> AbstractContextManager[None]:
        """Inside this block a layer's query is predicted from `hidden`, on a side stream where there is one."""
        return nullcontext()

    def record_event(self) -> Callable[[], None]:
        """Calling the result makes what follows wait for what is on the current stream now."""
        return nothing_to_wait_for

    def timestamp_slot(self, layer: int, who: str) -> Tensor | None:
        """Where a kernel leaves the time of its end, if anybody wants to know. who: `gpu` or `pull`."""
        return None

    def close(self) -> None:
        """Stops what it started."""


@dataclass(frozen=True)
class StepTable:
    """One decode step: `rows` sequences whose numbers stand in a table memory; rows past the step's are padding."""

    memory: TableMemory
    rows: int
    block: int
    host: bool
    """Whether anything in DRAM is attended; steps of sequences that lie on the GPU altogether have no such part."""
    bridge: HostBridge
    """By what the CPU's work of the step is handed over."""
    longest: Mapping[str, int] = field(default_factory=dict)
    """By tier: entries of the longest list, where the host may know; else as many as the list has room for."""

    def column(self, name: str) -> Tensor:
        """`[rows]` of a number or `[rows, width]` of a list, on the layers' device."""
        return self.memory.device_rows(name, self.rows)

    @property
    def seq(self) -> Tensor:
        """`[rows]`: the number by which the cache knows each sequence; for padding rows, one past the last."""
        return self.column("seq")

    @property
    def write_block(self) -> Tensor:
        """`[rows]`: the GPU block of each new token."""
        return self.column("write_block")

    @property
    def flush_to(self) -> Tensor | None:
        """`[rows]`: the host block that the GPU's, now full, is written through to; NO_BLOCK: it is not full."""
        return self.column("flush_to") if self.memory.has("flush_to") else None

    def visible(self) -> Selection:
        """Everything the step's queries may see."""
        return Selection.of(self._list("gpu"), self._list("host") if self.host else None)

    def _list(self, tier: Tier) -> BlockList | None:
        if not self.memory.has(f"{tier}_blocks"):
            return None
        table = self.column(f"{tier}_blocks").view(self.rows, 1, -1)
        tokens = self.column(f"{tier}_lens").view(self.rows, 1)
        longest = min(self.longest.get(tier, 1 << 31), table.shape[-1] * self.block)
        if tier == "gpu" or table.device.type == "cpu":
            return BlockList(table, tokens, longest)
        ids, counts = (self.memory.host(name)[: self.rows] for name in (f"{tier}_blocks", f"{tier}_lens"))
        on_host = BlockList(ids.view(self.rows, 1, -1), counts.view(self.rows, 1), longest)
        return BlockList(table, tokens, longest, on_host=on_host)
