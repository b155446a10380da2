"""`weighted_sum` in C++: each value is read once for all query heads of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from coattn.kernels.native.attend import DTYPES, MISSING, share_cores
from coattn.kernels.quantise.values import ValueBlocks

if TYPE_CHECKING:
    from coattn.native.values import Values


def refuses(values: ValueBlocks) -> str | None:
    """Why the extension cannot take values, or None."""
    if MISSING is not None:
        return MISSING
    if values.memory.device.type != "cpu":
        return f"the values lie on {values.memory.device}, not in host memory"
    if values.form == "model" and values.memory.dtype not in DTYPES:
        return f"the values are {values.memory.dtype}"
    if values.d % 8:
        return f"head size {values.d} is not a multiple of 8"
    return None


def entries_of(values: ValueBlocks) -> Values:
    """The same as the extension takes it; the call must not be refused."""
    from coattn import native
    from coattn.native.values import Values

    element = native.element_of(values.memory.dtype) if values.form == "model" else values.form
    return Values(values.memory, element, values.block, values.memory.shape[1], values.d)


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, values: ValueBlocks, table: Tensor) -> Tensor:
    """See the reference; the call must not be refused."""
    from coattn import native

    share_cores()
    entries = native.Entries(entries_of(values), table.contiguous())
    return native.weighted_sum(weights.contiguous(), index.contiguous(), count.contiguous(), entries)
