"""`append` of a decode step: one new token a sequence, at places that stand in the step table; `write_rows`: many."""

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.quantise.blocks import PackedBlocks, as_blocks, pack_blocks, scales_of
from coattn.kernels.quantise.tokens import TokenBlocks


@Operation
def write_rows(gpu: Tensor | TokenBlocks, ids: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Token i of k, v `[tokens, kv_heads, d]` goes to row `rows[i]` of block `ids[i]`. No two tokens share a place."""
    if isinstance(gpu, TokenBlocks):
        gpu.write(ids, rows, k, v)
        return
    gpu[ids, :, 0, rows] = k.to(gpu.dtype)
    gpu[ids, :, 1, rows] = v.to(gpu.dtype)


def read_rows(blocks: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `write_rows`: k, v `[tokens, kv_heads, d]`."""
    return blocks[ids, :, 0, rows], blocks[ids, :, 1, rows]


def whole_blocks(k: Tensor, v: Tensor, block: int) -> Tensor:
    """k, v `[n * block, kv_heads, d]`, in order -> `[n, kv_heads, 2, block, d]`."""
    return torch.stack([x.reshape(-1, block, *x.shape[1:]).transpose(1, 2) for x in (k, v)], 2)


@Operation
def append(
    gpu: Tensor | TokenBlocks,
    ids: Tensor,
    places: Tensor,
    k: Tensor,
    v: Tensor,
    host: Tensor | PackedBlocks | None = None,
    flush_to: Tensor | None = None,
) -> None:
    """k, v `[rows, kv_heads, d]` to rows `places` of blocks `ids` of gpu `[n, kv_heads, 2, size, d]`, or in few bits.

    flush_to: the block of host that each of these blocks, now full, is written through to; negative: it is not full.
    host: like gpu, or in 8 bits, whose scales go to GPU memory too where they have a place there. A GPU writes to
    mapped memory.
    """
    write_rows.reference(gpu, ids.long(), places.long(), k, v)
    if host is not None and flush_to is not None and isinstance(gpu, Tensor):
        full = (flush_to >= 0).nonzero()[:, 0]
        blocks, to = gpu[ids[full].long()], flush_to[full].long()
        away = as_blocks(host, *gpu.shape[3:])
        if isinstance(away, Tensor):
            away[to] = blocks.to(away.device)
            return
        made = pack_blocks(blocks)
        away.memory[to] = made.to(away.memory.device)
        if away.scales is not None:
            away.scales[to] = scales_of(made, *gpu.shape[3:])
