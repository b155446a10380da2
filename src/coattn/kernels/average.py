"""`attend_averaging`: attention of one query token a sequence that also keeps each entry's average weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.attend import reference
from coattn.kernels.native import attend as native
from coattn.kernels.sink_logits import with_sink_piece
from coattn.kernels.softcap import softcap as capped
from coattn.state import AttnState, Split
from coattn.types import BlockList


@dataclass(frozen=True)
class Average:
    """Attention weights of single entries, gathered over steps: `new = keep * old + gain * weight`.

    values: `[n, kv_heads, block]` float32, one for each entry of a block memory, rows contiguous. Weights are those of
    the softmax over what is attended in the same call and the sinks; of the query heads of a KV head the largest, or
    their sum.
    """

    values: Tensor
    keep: float
    gain: float
    summed: bool = False
    sink_logits: Tensor | None = None
    """Of the layer, `[q_heads]`."""


def attend_averaging(
    q: Tensor,
    blocks: Tensor,
    picked: BlockList,
    scale: float,
    softcap: float | None,
    average: Average,
    stamp: Tensor | None = None,
) -> AttnState | Split:
    """Like `attend` of q `[seqs, 1, q_heads, d]` over lists that all heads share; the averages change in place.

    The last entry of a list is new: its average starts at zero. Cost: keys and values are read once.
    """
    if q.device.type == "cuda":
        from coattn.kernels.triton import attend as triton
        from coattn.kernels.triton.average import update as update_on_gpu

        if triton.refuses(q, blocks) is None:
            scores = triton.room_for_scores(q, picked)
            state = triton.attend(q, blocks, picked, scale, softcap, stamp, scores)
            lse = with_sink_piece(state.lse, average.sink_logits)
            update_on_gpu(average.values, average.keep, average.gain, average.summed, picked, scores, lse)
            return state
    elif native.refuses(q, blocks) is None:
        done, weights = native.attend_weighing(q, blocks, picked, scale, softcap)
        update(average, picked, weights, done.lse)
        return done
    done = reference(q, blocks, picked, scale, softcap)
    update(average, picked, weigh(q, blocks, picked, scale, softcap), done.lse)
    return done


def weigh(q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None) -> Tensor:
    """q `[seqs, 1, q_heads, d]` over lists that all heads share -> softmax weights `[seqs, q_heads, longest]`."""
    seqs, _, q_heads, d = q.shape
    kv_heads, block = blocks.shape[1], blocks.shape[3]
    used = -(-picked.longest // block)
    offsets = torch.arange(used * block, device=blocks.device)
    absent = offsets >= picked.tokens[:, :1]
    ids = picked.table[:, 0, :used].long().masked_fill(absent[:, ::block], 0)
    keys = blocks[ids][:, :, :, 0].float()  # [seqs, used, kv_heads, block, d]
    keys = keys.transpose(1, 2).reshape(seqs, kv_heads, -1, d)
    grouped = q.float().view(seqs, kv_heads, -1, d) * scale
    scores = (grouped @ keys.transpose(2, 3)).view(seqs, q_heads, -1)
    return capped(scores, softcap).masked_fill(absent[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)


def update(average: Average, picked: BlockList, weights: Tensor, lse: Tensor) -> None:
    """The listed entries get weights `[seqs, q_heads, at least longest]`: of a softmax of lse `[seqs, 1, q_heads]`."""
    values = average.values
    kv_heads, block = values.shape[1], values.shape[2]
    if average.sink_logits is not None:
        weights = weights * (lse[:, 0] - average.sink_logits).sigmoid()[..., None]
    grouped = weights.view(len(weights), kv_heads, -1, weights.shape[-1])
    one = grouped.sum(2) if average.summed else grouped.amax(2)  # [seqs, kv_heads, n]
    for ids, count, own in zip(picked.table[:, 0], picked.tokens[:, 0].tolist(), one, strict=True):
        if not count:
            continue
        token = torch.arange(count, device=values.device)
        block_ids, rows = ids[token // block].long(), token % block
        old = values[block_ids, :, rows]
        old[-1] = 0.0
        values[block_ids, :, rows] = average.keep * old + average.gain * own[:, :count].T.to(values.device)
