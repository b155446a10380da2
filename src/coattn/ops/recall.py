"""`recall`: blocks from DRAM into the pool of resident ones."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.recall import recall as reference


def recall(near: Tensor, far: Tensor, to: Tensor, source: Tensor) -> None:
    """See the reference. near `[n, kv_heads, 2, block, d]`, to, source `[seqs, kv_heads, m]`; negative: nothing."""
    if near.device.type == "cuda":
        from coattn.ops.triton.recall import recall as kernel

        kernel(near, far, to, source)
    else:
        reference(near, far, to, source)
