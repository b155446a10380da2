"""Copying blocks from DRAM into a pool in GPU memory, each KV head its own."""

from __future__ import annotations

from torch import Tensor

from coattn.quantise.blocks import is_packed, unpack_blocks


def recall(near: Tensor, far: Tensor, to: Tensor, source: Tensor) -> None:
    """Block `source[s, h, i]` of far `[n, kv_heads, 2, block, d]`, KV head h, becomes block `to[s, h, i]` of near.

    to, source: `[seqs, kv_heads, m]` on the device of near; negative in `to`: nothing. No two share a place. Far blocks
    may be in 8 bits, `[n, kv_heads, bytes]`.
    """
    heads = (to >= 0).nonzero()[:, 1]
    ids, wanted = to[to >= 0].long(), source[to >= 0].long()
    found = far[wanted.to(far.device), heads.to(far.device)].to(near.device)
    block, d = near.shape[3:]
    near[ids, heads] = unpack_blocks(found, block, d, near.dtype) if is_packed(far) else found
