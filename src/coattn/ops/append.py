"""`append` of a decode step: one new token a sequence, at places that stand in the step table."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.append import append as reference
from coattn.store.step_table import StepTable


def append(table: StepTable, near: Tensor, k: Tensor, v: Tensor, far: Tensor | None = None) -> None:
    """k, v `[rows, kv_heads, d]` into near `[n, kv_heads, 2, block, d]`; full blocks on to far."""
    spill = table.spill if far is not None else None
    block = near.shape[3]
    if near.device.type == "cuda" and (spill is None or block & (block - 1) == 0):
        from coattn.ops.triton.append import append as kernel

        kernel(near, table.ids, table.places, k, v, far, spill)
    else:
        reference(near, table.ids, table.places, k, v, far, spill)
