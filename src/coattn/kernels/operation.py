"""One name for an operation: its plain meaning in PyTorch, and the kernel that a GPU has for it."""

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """Declared by its reference: `@Operation` above a function in plain PyTorch, short, obviously right, any device.

    Where the first argument lies on a GPU, the function of the same name and signature computes it, in the file of the
    same name in `triton/`. Kernels are tested against `reference`.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.__doc__ = reference.__doc__

    @cached_property
    def kernel(self) -> Callable[P, R]:
        """Imported when it is first used: a machine without a GPU need not have Triton."""
        module = importlib.import_module(self.reference.__module__.replace("kernels.", "kernels.triton."))
        kernel: Callable[P, R] = getattr(module, self.reference.__name__)
        return kernel

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        compute = self.kernel if args[0].device.type == "cuda" else self.reference  # type: ignore[attr-defined]
        return compute(*args, **kwargs)
