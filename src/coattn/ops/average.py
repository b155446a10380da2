"""`attend_averaging`: attention of one query token a sequence that also keeps each entry's average weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coattn.ops.native import attend as native
from coattn.ops.reference import attend as reference
from coattn.ops.reference.average import update, weigh
from coattn.state import AttnState, Split
from coattn.types import BlockList


@dataclass(frozen=True)
class Average:
    """Moving averages of attention weights: `new = (1 - alpha) * old + alpha * weight`.

    values: `[n, kv_heads, block]` float32, one for each entry of a block memory. Weights are those of the softmax over
    what is attended in the same call; of the query heads of a KV head, the largest.
    """

    values: Tensor
    alpha: float


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
        from coattn.ops.triton import attend as triton
        from coattn.ops.triton.average import update as update_on_gpu

        if triton.refuses(q, blocks) is None:
            scores = triton.room_for_scores(q, picked)
            state = triton.attend(q, blocks, picked, scale, softcap, stamp, scores)
            update_on_gpu(average.values, average.alpha, picked, scores, state.lse)
            return state
    elif native.refuses(q, blocks) is None:
        done, weights = native.attend_weighing(q, blocks, picked, scale, softcap)
        update(average.values, average.alpha, picked, weights)
        return done
    done = reference.attend(q, blocks, picked, scale, softcap)
    update(average.values, average.alpha, picked, weigh(q, blocks, picked, scale, softcap))
    return done
