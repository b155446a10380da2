"""`attend`: queries over listed blocks, wherever the blocks lie."""

import torch
from torch import Tensor

from coattn.kernels import flash
from coattn.kernels.merge import merge_states
from coattn.kernels.native import attend as native
from coattn.kernels.quantise.tokens import TokenBlocks
from coattn.kernels.softcap import softcap as capped
from coattn.state import AttnState, Split
from coattn.types import BlockList


def attend(
    q: Tensor,
    blocks: Tensor | TokenBlocks,
    picked: BlockList,
    scale: float,
    softcap: float | None,
    stamp: Tensor | None = None,
) -> AttnState | Split:
    """q `[seqs, queries, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]` -> attention over the listed entries.

    Few queries: the C++ kernels in host memory, but for shapes they refuse; Triton on a GPU. Many queries of one
    sequence: the kernels of `kernels/prompt`. Elsewhere: the reference.
    stamp: where Triton's kernel leaves the time of its end.
    """
    if q.device.type == "cuda":
        from coattn.kernels.triton import attend as triton

        if isinstance(blocks, TokenBlocks):
            from coattn.kernels.triton import tokens

            if triton.refuses(q, blocks) is None:
                return tokens.attend(q, blocks, picked, scale, softcap, stamp)
        elif triton.refuses(q, blocks) is None:
            return triton.attend(q, blocks, picked, scale, softcap, stamp)
        if flash.refuses(q, blocks, picked, softcap) is None:
            return flash.attend(q, blocks, picked, scale, softcap)
    elif flash.refuses(q, blocks, picked, softcap) is None:
        return flash.attend(q, blocks, picked, scale)
    elif isinstance(blocks, Tensor) and native.refuses(q, blocks) is None:
        return native.attend(q, blocks, picked, scale, softcap)
    if isinstance(blocks, TokenBlocks):
        return attend_unpacked(q, blocks, picked, scale, softcap)
    return reference(q, blocks, picked, scale, softcap)


PIECE = 8192
"""Entries of few bits that are unpacked at a time."""


def attend_unpacked(
    q: Tensor, blocks: TokenBlocks, picked: BlockList, scale: float, softcap: float | None
) -> AttnState | Split:
    """The same over blocks in few bits, each in the model's own numbers for as long as it is attended."""
    states, block = [], blocks.block
    each = max(1, PIECE // block)
    for first in range(0, -(-picked.longest // block), each):
        longest = min(picked.longest - first * block, each * block)
        table = picked.table[:, :, first : first + -(-longest // block)]
        tokens = (picked.tokens - first * block).clamp(0, longest)
        # ids past a sequence's last block may be anything
        listed = torch.arange(0, longest, block, device=table.device) < tokens[..., None]
        ids, places = torch.unique(table.where(listed, 0), return_inverse=True)
        own = BlockList(places.to(torch.int32), tokens.to(torch.int32), longest)
        states.append(attend(q, blocks.read(ids.long()), own, scale, softcap))
    return merge_states(states or [AttnState.empty(q)])


def reference(q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None) -> AttnState:
    """The meaning of `attend`: out like q, lse without d.

    Every query sees every listed entry: the entries lie before the step's own tokens. Cost: copies the listed blocks.
    """
    seqs, queries, q_heads, d = q.shape
    kv_heads, block = blocks.shape[1], blocks.shape[3]
    used = -(-picked.longest // block)
    if not used:
        return AttnState.empty(q)
    lists = picked.table[:, :, :used].expand(-1, kv_heads, -1).long()
    heads = torch.arange(kv_heads, device=blocks.device)[None, :, None]
    # ids past a sequence's last block may be anything: read block 0 there, the mask hides it
    offsets = torch.arange(used * block, device=blocks.device)
    tokens = picked.tokens.expand(-1, kv_heads)
    lists = lists.where(offsets[::block] < tokens[..., None], 0)
    entries = blocks[lists, heads].to(torch.float32)  # [seqs, kv_heads, used, 2, block, d]
    k, v = (entries[:, :, :, i].flatten(2, 3) for i in (0, 1))

    grouped = q.to(torch.float32).view(seqs, queries, kv_heads, q_heads // kv_heads, d)
    scores = torch.einsum("sqhgd,shnd->shqgn", grouped * scale, k)
    scores = capped(scores, softcap).masked_fill(offsets >= tokens[:, :, None, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("shqgn,shnd->sqhgd", weights, v).reshape(q.shape)
    return AttnState(out, lse.permute(0, 2, 1, 3).reshape(seqs, queries, q_heads))
