"""Triton's interpreter, which finds loads and stores outside the tensors that a kernel was given.

On a GPU such a load returns whatever lies there, or ends the process where nothing does; the interpreter reads the
host's memory as calmly.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

Range = tuple[int, int]
"""First address, and the one past the last."""


def _ranges(given: Any) -> Iterator[Range]:
    for arg in given:
        if isinstance(arg, tuple | list):
            yield from _ranges(arg)
        elif isinstance(arg, torch.Tensor):
            memory = arg.untyped_storage()
            yield memory.data_ptr(), memory.data_ptr() + memory.nbytes()


def _stray(known: list[Range], pointers: Any, mask: Any, size: int) -> str | None:
    """What is wrong where an element of this size that the mask lets through is in none of the ranges."""
    at = np.asarray(pointers)[np.broadcast_to(mask, np.shape(pointers)).astype(bool)].astype(np.int64)
    first, last = (int(at.min()), int(at.max()) + size) if at.size else (0, 0)
    if first == last or any(low <= first and last <= high for low, high in known):
        return None
    inside = np.any([(at >= low) & (at + size <= high) for low, high in known], 0)
    if inside.all():
        return None
    wrong = int(at[~inside][0])
    low, high = min(known, key=lambda r: max(r[0] - wrong, wrong - r[1]))
    return (
        f"{int((~inside).sum())} of {at.size} elements of {size} bytes lie outside every tensor; the first is "
        f"{wrong - low} bytes from the start of one of {high - low}"
    )


class _Checked:
    """Triton's module of loads and stores, which looks at every address first."""

    def __init__(self, own: Any) -> None:
        self._own, self.known, self.faults = own, list[Range](), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _check(self, pointers: Any, mask: Any, size: int) -> None:
        fault = _stray(self.known, pointers, mask, size)
        if fault is not None:
            self.faults.append(fault)
            raise IndexError(fault)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(pointers, mask, np.dtype(dtype).itemsize)
        return self._own.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize)
        return self._own.store(pointers, value, mask)

    def atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize)
        return self._own.atomic_rmw(op, pointers, value, mask, order)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, order: Any) -> Any:
        self._check(pointers, True, value.dtype.itemsize)
        return self._own.atomic_cas(pointers, compared, value, order)


@contextmanager
def checked() -> Iterator[None]:
    """Interpreted kernels that leave their tensors raise inside this block, and it raises, too: a fused form that fails
    is one that the model does without."""
    from triton.runtime import interpreter

    run, memory = interpreter.GridExecutor._init_args_hst, _Checked(interpreter._interpreter)

    def noted(self: Any, args: Any, options: Any) -> Any:
        made = run(self, args, options)
        memory.known = list(_ranges([made[0], list(made[1].values())]))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", noted)
        patch.setattr(interpreter, "_interpreter", memory)
        yield
    assert not memory.faults, memory.faults[0]


@pytest.fixture(autouse=True)
def addresses() -> Iterator[None]:
    """No kernel that a test interprets leaves its tensors."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    pytest.importorskip("triton")
    with checked():
        yield
