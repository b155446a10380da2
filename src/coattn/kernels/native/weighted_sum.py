"""`weighted_sum` in C++: each value is read once for all query heads of its group."""

from torch import Tensor

from coattn import native
from coattn.kernels.native.attend import DTYPES, share_cores
from coattn.kernels.quantise.values import ValueBlocks


def refuses(values: ValueBlocks) -> str | None:
    """Why the extension cannot take values, or None."""
    if values.memory.device.type != "cpu":
        return f"the values lie on {values.memory.device}, not in host memory"
    if values.form == "model" and values.memory.dtype not in DTYPES:
        return f"the values are {values.memory.dtype}"
    if values.d % 8:
        return f"head size {values.d} is not a multiple of 8"
    return None


def source(values: ValueBlocks) -> native.Values:
    """The same as the extension takes it; the call must not be refused."""
    element = native.element_of(values.memory.dtype) if values.form == "model" else values.form
    return native.Values(values.memory, element, values.block, values.memory.shape[1], values.d)


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, values: ValueBlocks, table: Tensor) -> Tensor:
    """See the reference; the call must not be refused."""
    share_cores()
    weights, index, count, table = (x.contiguous() for x in (weights, index, count, table))
    return native.plan_weighted_sum(weights, index, count, source(values), table).run()
