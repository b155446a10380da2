"""Memory in DRAM: where there is a GPU, mapped on huge pages, touched by all threads and registered."""

import ctypes
import math
import mmap
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.cache import available
from coattn.cache.ledger import PLACE

HUGE_PAGE_BYTES = 2 << 20


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """`[nbytes]` uint8, zeroed, 64-byte aligned; a GPU `device` can read and write it at its own address.

    Without a GPU it is ordinary memory, which the system hands out page by page as it is written (PyTorch's own zeros
    are all written at once); with a meta device it is a size and nothing else. Raises OSError where there is none.
    """
    if device.type == "meta":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if nbytes == 0 or (device.type != "cuda" and nbytes < HUGE_PAGE_BYTES):
        return torch.zeros(nbytes, dtype=torch.uint8)
    if device.type != "cuda":
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a wish: ordinary pages work too
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)
    arena = native.Arena(nbytes, device)
    arena.grow(nbytes)
    return arena.memory()[:nbytes]


def untouched(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros on the CPU whose pages the system hands out as they are written."""
    return host_memory(math.prod(size) * dtype.itemsize, torch.device("cpu")).view(dtype).view(size)


def layer_views(memory: Tensor, sizes: Mapping[int, tuple[torch.dtype, tuple[int, ...]]]) -> dict[int, Tensor]:
    """Tensors of so many layers, one after the other in a stretch of bytes."""
    start, views = 0, {}
    for layer, (dtype, size) in sizes.items():
        end = start + math.prod(size) * dtype.itemsize
        views[layer] = memory[start:end].view(dtype).view(size)
        start = end
    return views


class CopyStream:
    """Copies from a GPU to DRAM beside what follows on its current stream."""

    def __init__(self) -> None:
        self._stream: Any = None

    def start(self, source: Tensor, copy: Callable[[Tensor], object]) -> Any:
        """`copy(source)`, on a stream of its own -> the event after which it is done."""
        device = source.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy(source)
            event = self._stream.record_event()
        source.record_stream(self._stream)
        return event


class Growing:
    """Memory in DRAM that grows up to `most` bytes and never moves; only the CPU uses it."""

    def __init__(self, most: int) -> None:
        self.most = -(-max(1, most) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._arena = native.Arena(self.most)
        self.committed = 0
        buffer: Any = (ctypes.c_uint8 * self.most).from_address(self._arena.base)
        buffer.arena = self._arena  # torch.frombuffer keeps the buffer, the buffer keeps the arena
        self.memory = torch.frombuffer(buffer, dtype=torch.uint8)
        """`[most]` uint8; what lies past `committed` may not be touched."""

    def grow(self, nbytes: int, alone: bool = False, touched: bool = True) -> None:
        """At least `nbytes` may be used afterwards, zeroed. alone: the calling thread touches them, and no other.

        Not touched: the first write to a page pays for it.
        """
        if nbytes > self.committed:
            available.require(nbytes - self.committed, "What attention keeps of the sequences", PLACE["host"])
            self._arena.grow(min(self.most, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES), alone, touched)
            self.committed = self._arena.committed
