"""Whether a model's forward call waits for the GPU somewhere: such a call cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operations whose result, or its shape, the host must know."""
INDEXING = ("index", "index_put", "index_put_")
"""They wait where an index is a mask."""
COPIES = ("_to_copy", "copy_")


class _WaitsError(Exception):
    pass


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops at the first operation that waits, before it runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args, kwargs or {}):
            raise _WaitsError(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def _waits(func: Any, args: Any, options: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in INDEXING:
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if name in COPIES:
        to = options.get("device") if name == "_to_copy" else args[0].device
        source = args[0] if name == "_to_copy" else args[1]
        devices = {source.device.type, source.device.type if to is None else torch.device(to).type}
        return len(devices) > 1 and not (options.get("non_blocking") or (len(args) > 2 and args[2]))
    return bool(DEPENDS & set(func.tags))


def waits(call: Callable[[], object]) -> str | None:
    """At which operation a forward call waits; None: it can be captured. Called before, for what is made once."""
    call()
    try:
        with torch.no_grad(), _Watch():  # type: ignore[no-untyped-call]
            call()
    except _WaitsError as found:
        return f"the model's forward call waits for the GPU at {found}"
    return None
