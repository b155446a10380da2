"""`append` of a decode step: one new token a sequence, at places that stand in the step table; `write_rows`: many."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.reference.append import append as reference
from coattn.kernels.reference.append import write_rows as write_reference


def append(
    gpu: Tensor,
    block: Tensor,
    offset: Tensor,
    k: Tensor,
    v: Tensor,
    host: Tensor | PackedBlocks | None = None,
    flush_to: Tensor | None = None,
) -> None:
    """k, v `[rows, kv_heads, d]` to rows `offset` of blocks `block` of gpu `[n, kv_heads, 2, size, d]`.

    flush_to: the host block that each of these blocks, now full, is written through to; negative: it is not full.
    Of host blocks in 8 bits scales are written to GPU memory, too, where they have a place there.
    """
    size = gpu.shape[3]
    if gpu.device.type == "cuda" and (flush_to is None or size & (size - 1) == 0):
        from coattn.kernels.triton.append import append as kernel

        kernel(gpu, block, offset, k, v, host, flush_to)
    else:
        reference(gpu, block, offset, k, v, host, flush_to)


def write_rows(gpu: Tensor, ids: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Token i of k, v `[tokens, kv_heads, d]` goes to row `rows[i]` of block `ids[i]`. No two tokens share a place."""
    if gpu.device.type == "cuda":
        from coattn.kernels.triton.append import write_rows as kernel

        kernel(gpu, *(x.to(gpu.device) for x in (ids, rows, k, v)))
    else:
        write_reference(gpu, ids, rows, k, v)
