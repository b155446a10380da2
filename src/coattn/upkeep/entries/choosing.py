"""After a prompt or turn: all that lies in DRAM is weighed with its last queries, and chosen from afresh."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.cache.dense import marks_of
from coattn.units import ceil_div
from coattn.upkeep.entries.weighing import Weighed, weigh_host, weigh_window

if TYPE_CHECKING:
    from coattn.index.rest import LeftOut
    from coattn.upkeep.entries.entries import Entries

REST = 2.0
"""How long a thread rests after a piece of work, by the time that it took: copies take memory bandwidth, which is what
the steps of others wait for."""
NICE = 10
"""How far a thread that chooses stands back behind those that run steps."""


class Choice:
    """What becomes of the lists of one sequence, which nobody reads until it is over.

    Made on the thread that runs the steps; `run` may be on another. It goes layer by layer, in pieces that take about a
    millisecond, nearly all of it in C++ without the interpreter, without the worker pool and without PyTorch's threads:
    all of these are what the steps of others need. Where the keys are still in spare GPU memory they are read there,
    else out of DRAM.
    """

    def __init__(self, entries: Entries, slot: int, length: int) -> None:
        """length: of the sequence, with the token that it decodes next."""
        self.entries, self.slot, self.length = entries, slot, length
        self.first = entries.gpu.first(length)
        """Blocks that are chosen from."""
        self.heard = dict(entries.heard.get(slot, {}))
        self.before = entries.stale[slot]
        self.left: dict[int, LeftOut] = {}
        """By layer: what stands in for entries that are not kept, where anything does."""
        # decode steps that choose again have weighed the window themselves
        self._new = entries.renewal is None or slot not in entries.renewal.begun
        self._reads = threading.Lock()
        self._still = False
        self._stop = torch.zeros(1, dtype=torch.int32)
        """Set for a moment, or for good: what is being written ends with its piece."""
        self._threads: ThreadPoolExecutor | None = None
        """One for each KV head, where it is waited for."""
        self.held = None if entries.cache.reading is None else self._hold()
        self.waited_for = False
        """Whether the steps of others have stopped for it: then it takes whatever there is to be soon over."""
        self._given_up = False
        self._window: list[Weighed] = []
        self._inference = torch.is_inference_mode_enabled()
        """Threads begin without it, and may then not write to what was made in it."""

    def _hold(self) -> Any:
        reading = self.entries.cache.reading
        assert reading is not None
        return reading.hold(marks_of(self.entries.cache, self.slot, self.first)) if reading.spare_room else None

    @property
    def ids(self) -> Tensor:
        """`[blocks]` int32: where what is chosen from lies now. It may move while nobody reads."""
        return self.entries.table.rows[self.slot, : self.first]

    def stand_still(self) -> None:
        """Reads nothing until it may go on: its blocks are about to be replaced by others, and overwritten."""
        if not self._still:
            self._stop[0] = 1
            self._reads.acquire()
            self._still = True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Blocks are where they are inside. Once it is waited for nobody replaces any, and heads read at once."""
        with nullcontext() if self.waited_for else self._reads:
            yield

    def go_on(self) -> None:
        """Blocks have been replaced."""
        if self._still:
            self._stop[0] = int(self._given_up)
            self._still = False
            self._reads.release()

    def give_up(self) -> None:
        """Nobody wants it any more; it ends after the piece that it is at."""
        self._given_up = True
        self._stop[0] = 1
        self.go_on()

    def weigh(self) -> None:
        """The window's entries weigh what was found. Between steps: those of others write to the same memory."""
        for layer, ids, rows, made in self._window:
            self.entries.averages[layer][ids, :, rows] = made

    def close(self) -> None:
        """It is over. On the thread that runs the steps."""
        if self._threads is not None:
            self._threads.shutdown()
        if self.held is not None:
            self.entries.cache.reading.let_go(self.held)  # type: ignore[union-attr]
            self.held = None

    def run(self) -> None:
        """Weighs and copies. Lists that were empty hold what is kept."""
        with torch.inference_mode(self._inference):
            self._run()

    def _run(self) -> None:
        entries = self.entries
        for layer in entries.cache.spec.layers if self.first else ():
            with self._reading():
                weights = weigh_host(self, layer)
                known = layer in self.heard
                kept = entries.keep(weights, self.first * entries.block) if known else torch.ones_like(weights).bool()
                counts = kept.sum(-1).tolist()  # waits for the keys
                if entries.left is not None:
                    q, scale = self.heard.get(layer), entries.scale.get(layer, 1.0)
                    self.left[layer] = entries.left.weighed(layer, self.slot, kept, q, scale)
            position, weight = kept.nonzero()[:, 1].int().cpu(), weights[kept].cpu()
            if not self._copy(layer, counts, position, weight):
                return
        for layer, q in self.heard.items() if self._new else ():
            where = (layer, self.slot, self.before, self.length - 1)
            self._window.append(weigh_window(entries, *where, q, entries.scale[layer]))
        self._slowly(entries.lists.make_room)

    def _copy(self, layer: int, counts: list[int], position: Tensor, weight: Tensor) -> bool:
        """Entries of one KV head after the other, or all at once. False: nobody wants them any more."""
        at = [0, *itertools.accumulate(counts)]
        lists, parts = self.entries.lists, [slice(a, b) for a, b in itertools.pairwise(at)]

        def fill(head: int) -> None:
            with torch.inference_mode(self._inference):
                self._fill(layer, head, position[parts[head]], weight[parts[head]])

        if not self.waited_for:
            for head in range(len(counts)):
                fill(head)
            return not self._given_up
        lists.reserve(sum(ceil_div(count, lists.block) for count in counts))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(counts), "coattn-entries-head")
        list(self._threads.map(fill, range(len(counts))))
        return not self._given_up

    def _fill(self, layer: int, head: int, position: Tensor, weight: Tensor) -> None:
        lists, memory = self.entries.lists, self.entries.host[layer]
        block, one = (memory.stride(i) * memory.element_size() for i in (0, 1))
        where, source = (self.entries.numbers[layer], self.slot, head), memory.data_ptr() + head * one
        if not self.waited_for:
            self._slowly(partial(lists.reserve, ceil_div(len(position), lists.block)))
        at = 0
        while at < len(position) and not self._given_up:
            with self._reading():
                rest = 0.0 if self.waited_for else REST
                at += lists.fill(*where, position[at:], weight[at:], self.ids, source, block, rest, self._stop)

    def _slowly(self, take: Callable[[int | None], bool]) -> None:
        """Takes memory, at once where it is waited for, else little by little."""
        more = True
        while more and not self._given_up:
            begun = time.perf_counter()
            more = take(None if self.waited_for else self.entries.lists.blocks_of_piece())
            if not self.waited_for:
                time.sleep(REST * (time.perf_counter() - begun))


class Marks:
    """The state of GPUs at one moment, for a thread that works on streams of its own from there on."""

    def __init__(self, devices: set[torch.device], streams: dict[torch.device, Any]) -> None:
        self.streams, self.events = streams, dict[torch.device, Any]()
        for device in devices:
            if device not in streams:  # one for good: PyTorch keeps memory for each
                streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.events[device].record(torch.cuda.current_stream(device))

    @contextmanager
    def after(self) -> Iterator[None]:
        """Work inside comes after that moment; at the end it is waited for."""
        with ExitStack() as entered:
            for device, event in self.events.items():
                self.streams[device].wait_event(event)
                entered.enter_context(torch.cuda.stream(self.streams[device]))
            yield
            for device in self.events:
                self.streams[device].synchronize()


def stand_back() -> None:
    """The calling thread runs where nobody else wants to."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
