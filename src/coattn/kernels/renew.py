"""`renew`: a pool's residents after a layer's attention: misses come in, full blocks of the window too."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.reference.renew import Due
from coattn.kernels.reference.renew import renew as reference

__all__ = ["Due", "renew"]


def renew(
    gpu: Tensor, host: Tensor, digests: Tensor, rows: Rows, pool: Residents, lists: Lists, due: Due, moved: Tensor
) -> None:
    """gpu, host `[n, kv_heads, 2, block, d]`, digests `[n, kv_heads, 2, d]`; see the reference."""
    if gpu.device.type == "cuda":
        from coattn.kernels.triton.renew import renew as kernel

        kernel(gpu, host, digests, rows, pool, lists, due, moved)
    else:
        reference(gpu, host, digests, rows, pool, lists, due, moved)
