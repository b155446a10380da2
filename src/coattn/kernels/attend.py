"""`attend`: queries over listed blocks, wherever the blocks lie."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels import flash
from coattn.kernels.native import attend as native
from coattn.kernels.reference import attend as reference
from coattn.state import AttnState, Split
from coattn.types import BlockList


def attend(
    q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None, stamp: Tensor | None = None
) -> AttnState | Split:
    """q `[seqs, queries, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]` -> attention over the listed entries.

    Few queries: the C++ kernels in host memory, but for shapes they refuse; Triton on a GPU. Many queries of one
    sequence: the kernels of `ops/prompt`. Elsewhere: the reference.
    stamp: where Triton's kernel leaves the time of its end.
    """
    if q.device.type == "cuda":
        from coattn.kernels.triton import attend as triton

        if triton.refuses(q, blocks) is None:
            return triton.attend(q, blocks, picked, scale, softcap, stamp)
        if flash.refuses(q, blocks, picked, softcap) is None:
            return flash.attend(q, blocks, picked, scale, softcap)
    elif flash.refuses(q, blocks, picked, softcap) is None:
        return flash.attend(q, blocks, picked, scale)
    elif native.refuses(q, blocks) is None:
        return native.attend(q, blocks, picked, scale, softcap)
    return reference.attend(q, blocks, picked, scale, softcap)
