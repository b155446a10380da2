"""Writing new keys and values into blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.quantise.blocks import is_packed, pack_blocks, scales_of


def write_rows(blocks: Tensor, ids: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Token i of k, v `[tokens, kv_heads, d]` goes to row `rows[i]` of block `ids[i]`. No two tokens share a place."""
    blocks[ids, :, 0, rows] = k.to(blocks.dtype)
    blocks[ids, :, 1, rows] = v.to(blocks.dtype)


def whole_blocks(k: Tensor, v: Tensor, block: int) -> Tensor:
    """k, v `[n * block, kv_heads, d]`, in order -> `[n, kv_heads, 2, block, d]`."""
    return torch.stack([x.reshape(-1, block, *x.shape[1:]).transpose(1, 2) for x in (k, v)], 2)


def read_rows(blocks: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_rows`: k, v `[tokens, kv_heads, d]`."""
    return blocks[ids, :, 0, rows], blocks[ids, :, 1, rows]


def append(
    gpu: Tensor,
    ids: Tensor,
    places: Tensor,
    k: Tensor,
    v: Tensor,
    host: Tensor | None,
    flush_to: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    """One token a sequence into `gpu`; block `ids[i]` then on to host block `flush_to[i]` where that is not negative.

    host: like `gpu`, or in 8 bits (`quantise/blocks.py`); scales: where scales and minima of such blocks go, too.
    """
    write_rows(gpu, ids.long(), places.long(), k, v)
    if host is not None and flush_to is not None:
        full = (flush_to >= 0).nonzero()[:, 0]
        blocks, to = gpu[ids[full].long()], flush_to[full].long()
        made = pack_blocks(blocks) if is_packed(host) else blocks
        host[to] = made.to(host.device)
        if scales is not None:
            scales[to] = scales_of(made, *gpu.shape[3:])
