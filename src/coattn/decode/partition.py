"""Two parts of one GPU: streams whose kernels run on multiprocessors of their own, beside each other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

RESOURCE, COUNT_AT = 144, 96
"""Bytes of the driver's `CUdevResource`, and where in it the number of multiprocessors stands."""
SM, NON_BLOCKING, DEFAULT_STREAM, IN_PAIRS = 1, 1, 1, 1
"""The driver's constants: the kind of resource, a stream that ignores the default one, how a green context is made, and
that a part need not be made of eights."""


@dataclass(frozen=True)
class Partition:
    """What is captured or launched on a stream of a part stays on its multiprocessors."""

    few: Any
    rest: Any
    counts: tuple[int, int]
    """Multiprocessors of each."""


@cache
def split(device: torch.device, wanted: int) -> Partition | str:
    """At least `wanted` multiprocessors, and all others; or why there are none. Kept for the life of the process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the device's context is current now
            return _split(driver, device, wanted)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"the driver does not divide this GPU: {error}"


def _split(driver: Any, device: torch.device, wanted: int) -> Partition:
    number = torch.cuda.current_device() if device.index is None else device.index
    handle = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(handle), number))
    whole, few, rest = (ctypes.create_string_buffer(RESOURCE) for _ in range(3))
    _check(driver.cuDeviceGetDevResource(handle, whole, SM))
    groups = ctypes.c_uint(1)
    _check(
        driver.cuDevSmResourceSplitByCount(
            few, ctypes.byref(groups), whole, rest, IN_PAIRS if wanted % 8 else 0, wanted
        )
    )
    counts = tuple(int.from_bytes(part.raw[COUNT_AT : COUNT_AT + 4], "little") for part in (few, rest))
    if groups.value != 1 or not all(counts):
        raise RuntimeError(f"{wanted} multiprocessors leave none for others")
    streams = [_stream(driver, handle, part, device) for part in (few, rest)]
    return Partition(streams[0], streams[1], (counts[0], counts[1]))


def _stream(driver: Any, handle: Any, part: Any, device: torch.device) -> Any:
    description, context, stream = (ctypes.c_void_p() for _ in range(3))
    _check(driver.cuDevResourceGenerateDesc(ctypes.byref(description), part, 1))
    _check(driver.cuGreenCtxCreate(ctypes.byref(context), description, handle, DEFAULT_STREAM))
    _check(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"error {status}")
