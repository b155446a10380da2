"""`recall`: blocks from DRAM into the pool of resident ones."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.reference.recall import recall as reference


def recall(gpu: Tensor, host: Tensor | PackedBlocks, to: Tensor, source: Tensor) -> None:
    """See the reference. gpu `[n, kv_heads, 2, block, d]`, to, source `[seqs, kv_heads, m]`; negative: nothing."""
    if gpu.device.type == "cuda":
        from coattn.kernels.triton.recall import recall as kernel

        kernel(gpu, host, to, source)
    else:
        reference(gpu, host, to, source)
