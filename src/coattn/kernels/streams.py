"""Where kernels are launched: the device, and a stream for what runs beside the layers of a decode step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

FIRST = -1
"""The priority of what a step waits for, where attention runs beside it."""


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels inside this block run on the device: those that are compiled here do not ask where their tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class SideStream:
    """Runs kernels beside what follows on the current stream; without a GPU, at once."""

    def __init__(self, priority: int = 0) -> None:
        """priority: of kernels that wait for room, less is sooner."""
        self._priority = priority
        self._streams: dict[torch.device, Any] = {}
        self._forked: set[torch.device] = set()

    def run(self, device: torch.device, work: Callable[[], T]) -> T:
        """After what is on the current stream of the device now; what it returns may be read there when joined."""
        if device.type != "cuda":
            return work()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, self._priority)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        self._forked.add(device)
        with torch.cuda.stream(stream):
            return work()

    def join(self) -> bool:
        """The current streams wait for all that runs beside them. Whether anything does."""
        forked, self._forked = self._forked, set()
        for device in forked:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        return bool(forked)
