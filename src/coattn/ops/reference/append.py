"""Writing new keys and values into blocks."""

from __future__ import annotations

from torch import Tensor


def write_rows(blocks: Tensor, ids: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Token i of k, v `[tokens, kv_heads, d]` goes to row `rows[i]` of block `ids[i]`. No two tokens share a place."""
    blocks[ids, :, 0, rows] = k.to(blocks.dtype)
    blocks[ids, :, 1, rows] = v.to(blocks.dtype)


def write_blocks(blocks: Tensor, ids: Tensor, k: Tensor, v: Tensor) -> None:
    """Whole blocks: k, v `[len(ids) * block, kv_heads, d]`, in order."""
    n, block = len(ids), blocks.shape[3]
    for i, x in enumerate((k, v)):
        blocks[ids, :, i] = x.to(blocks.device, blocks.dtype).view(n, block, *x.shape[1:]).transpose(1, 2)


def read_rows(blocks: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_rows`: k, v `[tokens, kv_heads, d]`."""
    return blocks[ids, :, 0, rows], blocks[ids, :, 1, rows]


def append(
    near: Tensor, ids: Tensor, places: Tensor, k: Tensor, v: Tensor, far: Tensor | None, spill: Tensor | None
) -> None:
    """One token a sequence into near; block `ids[i]` then on to far block `spill[i]` where that is not negative."""
    write_rows(near, ids.long(), places.long(), k, v)
    if far is not None and spill is not None:
        full = (spill >= 0).nonzero()[:, 0]
        far[spill[full].long()] = near[ids[full].long()].to(far.device)
