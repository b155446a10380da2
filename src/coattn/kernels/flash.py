"""Attention of many queries over listed blocks: the keys and values are gathered, then attended as in a prompt."""

import torch
from torch import Tensor

from coattn.kernels.merge import merge_rows
from coattn.kernels.prompt import Mask, attend_prompt
from coattn.kernels.prompt.kernels import LARGEST, ON_CPU
from coattn.kernels.quantise.tokens import TokenBlocks
from coattn.state import AttnState
from coattn.types import BlockList

PIECE = 65536
"""Keys gathered from blocks at a time."""


MANY = 64
"""Query tokens from which it is faster than the kernels for few, on a CPU."""


def refuses(q: Tensor, blocks: Tensor | TokenBlocks, picked: BlockList, softcap: float | None) -> str | None:
    """Why a call over blocks cannot be taken, or None."""
    on_gpu, (seqs, queries, _, d) = q.device.type == "cuda", q.shape
    if on_gpu and d > LARGEST:
        return f"head size {d} does not fit"
    if not on_gpu and softcap is not None:
        return "scores are soft-capped"
    if not on_gpu and (queries < MANY or q.dtype not in ON_CPU):
        return f"there are {queries} tokens of {q.dtype}"
    if seqs != 1 or blocks.device != q.device or picked.table.shape[1] != 1:
        return "there is more than one sequence or one list, or the blocks are elsewhere"
    return None


def attend(
    q: Tensor, blocks: Tensor | TokenBlocks, picked: BlockList, scale: float, softcap: float | None = None
) -> AttnState:
    """q `[1, queries, q_heads, d]` over blocks `[n, kv_heads, 2, block, d]`; the lists are the same for all heads."""
    block, mask = blocks.shape[3], Mask(False, softcap=softcap)
    states = []
    for start in range(0, picked.longest, PIECE):
        tokens = min(PIECE, picked.longest - start)
        ids = picked.table[0, 0, start // block : -(-(start + tokens) // block)].long()
        k, v = rows(blocks, ids, tokens)
        states.append(attend_prompt(q[0], k, v, scale, mask))
    if not states:
        return AttnState.empty(q)
    whole = states[0] if len(states) == 1 else merge_rows(states, torch.float32)
    return AttnState(whole.out[None], whole.lse[None])


def rows(blocks: Tensor | TokenBlocks, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of listed blocks: k, v `[tokens, kv_heads, d]`, in one copy.

    On a CPU the rows of a head lie side by side, as its kernel wants them. On a GPU token after token: cuDNN compiles a
    program for every stride, and the strides of this form are the same for any number of tokens.
    """
    if isinstance(blocks, TokenBlocks):
        if blocks.device.type == "cuda":
            from coattn.kernels.triton.tokens import listed_rows as unpacked_rows

            return unpacked_rows(blocks, ids, tokens)
        blocks, ids = blocks.read(ids), torch.arange(len(ids))
    if blocks.device.type == "cuda":
        from coattn.kernels.triton.read_keys import listed_rows

        return listed_rows(blocks, ids, tokens)
    both = blocks.permute(2, 1, 0, 3, 4)[:, :, ids].flatten(2, 3)
    k, v = both[:, :, :tokens].transpose(1, 2)
    return k, v
