"""`weighted_sum` in C++: each value is read once for all query heads of its group."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.native.attend import DTYPES, MISSING, share_cores


def refuses(values: Tensor) -> str | None:
    """Why the extension cannot take values `[blocks, kv_heads, block, d]`, or None."""
    if MISSING is not None:
        return MISSING
    if values.device.type != "cpu":
        return f"the values lie on {values.device}, not in host memory"
    if values.dtype not in DTYPES:
        return f"the values are {values.dtype}"
    if values.shape[-1] % 8:
        return f"head size {values.shape[-1]} is not a multiple of 8"
    return None


def weighted_sum(weights: Tensor, index: Tensor, count: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """See the reference; the call must not be refused."""
    from coattn import native
    from coattn.native.values import Values

    share_cores()
    _, kv_heads, block, d = values.shape
    entries = native.Entries(Values(values, native.element_of(values.dtype), block, kv_heads, d), table.contiguous())
    return native.weighted_sum(weights.contiguous(), index.contiguous(), count.contiguous(), entries)
