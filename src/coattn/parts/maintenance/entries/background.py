"""Choices beside the steps: one thread makes them, one after another, and stands back behind everybody else."""

import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from coattn import native
from coattn.parts.maintenance.entries.choosing import Choice

NICE = 10
"""How far a thread that chooses stands back behind those that run steps."""


class Due(NamedTuple):
    """A choice that is to be made for a sequence of so many tokens; after: an event of the GPU that it comes after."""

    length: int
    after: Any


class BackgroundChooser:
    """Which sequences wait for a choice. All but what `_run` does is on the thread that runs the steps.

    A choice becomes due when a prompt or turn has been read, and nothing is done then: somebody waits for its first
    token. The next step of others begins it (`begin`). Where that step is the sequence's own, nobody else decodes, and
    it makes the choice itself.
    """

    def __init__(self, busy: dict[int, Future[Any]], device: torch.device) -> None:
        """busy: by sequence that waits; a choice that is due is not done. device: of the layers."""
        self.busy, self._device = busy, device
        self.choices: dict[int, Choice] = {}
        self._due: dict[int, Due] = {}
        self._stream: Any = None
        """The thread's, on a GPU: one for good, since PyTorch keeps memory for each."""
        self._thread = ThreadPoolExecutor(1, "coattn-entries", stand_back)

    def __contains__(self, slot: int) -> bool:
        return slot in self._due or slot in self.choices

    def due(self, slot: int, length: int) -> None:
        """A choice for a sequence of so many tokens is to be made beside the steps that follow."""
        after: Any = None
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            after = torch.cuda.current_stream(self._device).record_event()
        self._due[slot], self.busy[slot] = Due(length, after), Future()

    def begin(self, make: Callable[[int, int], Choice], but: Collection[int]) -> None:
        """Choices that are due are made from now on, except those of the slots of the step that is planned."""
        for slot in [slot for slot in self._due if slot not in but]:
            length, after = self._due.pop(slot)
            choice = self.choices[slot] = make(slot, length)
            self.busy[slot] = self._thread.submit(self._run, choice, after)

    def take(self, slot: int, length: int) -> Choice | None:
        """The choice for a sequence of so many tokens, as far as it has come; from now on nobody else has to do with
        it. None: there is none, or it failed."""
        choice, job = self.choices.get(slot), self.busy.get(slot)
        if choice is None or job is None or choice.length != length:
            return None
        choice.hurry()
        if job.cancel():
            return choice  # nobody has begun with it
        return choice if job.exception() is None else None

    def before_swap(self, slot: int, other: object) -> None:
        """No thread may read blocks that are about to be replaced: the sequence's own step does what is left."""
        if slot in self.choices:
            self.choices[slot].hurry()
            self._stop(slot)

    def hurry(self, slots: Collection[int]) -> None:
        """The step of these sequences has come."""
        for slot in slots:
            if slot in self.choices:
                self.choices[slot].hurry()

    def give_up(self, slot: int) -> bool:
        """What is chosen for a sequence is not wanted any more, whatever became of it -> whether its lists were
        touched."""
        self._due.pop(slot, None)
        choice = self.choices.get(slot)
        if choice is None:
            self.busy.pop(slot, None)
            return False
        choice.give_up()
        self._stop(slot)
        self.end(slot)
        return True

    def _stop(self, slot: int) -> None:
        """The thread does not begin with a sequence's choice, or is waited for."""
        job = self.busy.get(slot)
        if job is not None and not job.cancel():
            wait([job])

    def end(self, slot: int) -> None:
        self.busy.pop(slot, None)
        self.choices.pop(slot).close()

    def release(self) -> None:
        for slot in [*self._due, *self.choices]:
            self.give_up(slot)
        self._thread.shutdown()

    def _run(self, choice: Choice, after: Any) -> None:
        """On a GPU with work on a stream of its own, which comes after an event and is waited for at the end."""
        if after is None:
            choice.run()
            return
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            choice.run()
            self._stream.synchronize()


def stand_back() -> None:
    """The calling thread runs where nobody else wants to: behind others, and on CPUs that no worker is pinned to, where
    there are any. A worker that had to share its CPU would be what a step waits for."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    with suppress(OSError):
        others = os.sched_getaffinity(0) - set(native.worker_cpus())
        if len(others) > 1:  # one of them is worker 0's, who is whoever calls
            os.sched_setaffinity(threading.get_native_id(), others)
