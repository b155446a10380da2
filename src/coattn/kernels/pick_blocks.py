"""`pick_blocks`: the best blocks of each KV head, split by where they lie, in one kernel."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.reference.pick_blocks import Scores
from coattn.kernels.reference.pick_blocks import pick_blocks as reference
from coattn.kernels.reference.pick_blocks import score_parts as score_reference

__all__ = ["Scores", "pick_blocks", "score_parts"]


def score_parts(
    q: Tensor, digests: Tensor, rows: Rows, block: int, scale: float, softcap: float | None, slack: float
) -> Scores:
    """q `[seqs, q_heads, d]` against the digests of the blocks that may be picked; see the reference."""
    if q.device.type == "cuda":
        from coattn.kernels.cuda import score_digest as cuda
        from coattn.kernels.triton import score_digest as triton

        kernel = cuda.score_parts if cuda.refuses(q, digests) is None else triton.score_parts
        return kernel(q, digests, rows.host_blocks, rows.host_lens, block, scale, softcap, slack)
    return score_reference(q, digests, rows.host_blocks, rows.host_lens, block, scale, softcap, slack)


def pick_blocks(scores: Scores, rows: Rows, pool: Residents, lists: Lists) -> None:
    """Fills `lists` by these scores; see the reference."""
    if scores.blocks.device.type == "cuda":
        from coattn.kernels.triton.pick_blocks import pick_blocks as kernel

        kernel(scores, rows, pool, lists)
    else:
        reference(scores, rows, pool, lists)
