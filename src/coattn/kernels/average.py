"""`attend_averaging`: attention of one query token a sequence that also keeps each entry's average weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coattn.kernels.native import attend as native
from coattn.kernels.reference import attend as reference
from coattn.kernels.reference.average import update, weigh
from coattn.state import AttnState, Split
from coattn.types import BlockList


@dataclass(frozen=True)
class Average:
    """Attention weights of single entries, gathered over steps: `new = keep * old + gain * weight`.

    values: `[n, kv_heads, block]` float32, one for each entry of a block memory, rows contiguous. Weights are those of
    the softmax over what is attended in the same call; of the query heads of a KV head the largest, or their sum.
    """

    values: Tensor
    keep: float
    gain: float
    summed: bool = False


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
            update_on_gpu(average.values, average.keep, average.gain, average.summed, picked, scores, state.lse)
            return state
    elif native.refuses(q, blocks) is None:
        done, weights = native.attend_weighing(q, blocks, picked, scale, softcap)
        update(average.values, average.keep, average.gain, average.summed, picked, weights)
        return done
    done = reference.attend(q, blocks, picked, scale, softcap)
    weights = weigh(q, blocks, picked, scale, softcap)
    update(average.values, average.keep, average.gain, average.summed, picked, weights)
    return done
