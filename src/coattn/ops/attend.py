"""`attend`: queries over listed blocks, wherever the blocks lie."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.native import attend as native
from coattn.ops.reference import attend as reference
from coattn.state import AttnState
from coattn.types import BlockList


def attend(q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None) -> AttnState:
    """q `[seqs, queries, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]` -> AttnState shaped like q.

    Host memory: the C++ kernels, but for shapes they refuse. Elsewhere: the reference.
    """
    if native.refuses(q, blocks) is None:
        return native.attend(q, blocks, picked, scale, softcap)
    return reference.attend(q, blocks, picked, scale, softcap)
