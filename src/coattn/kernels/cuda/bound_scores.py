"""`bound_scores`: one small kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, module
from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.quantise.sketch import Scores

THREADS = 64
"""Few: so that a program finds room beside those that attend."""


def bound_scores(scores: Scores, near: Tensor, floors: Tensor, pool: PoolTensors, seq: Tensor, whole: bool) -> Tensor:
    """See `kernels/sketch.py`."""
    rows, n, q_heads = scores.lse.shape
    bound = torch.empty(rows, q_heads, dtype=torch.float32, device=near.device)
    assert near.stride()[1:] == (q_heads, 1)
    module("bound_scores.cu", (("THREADS", THREADS),), near.device).launch(
        "bound_scores", (-(-q_heads // (THREADS // 32)), rows, 1), THREADS,
        scores.lse, None if whole else scores.inside, near, bound, floors, scores.guess.contiguous(), pool.bound_margin,
        pool.est_lse, scores.off.contiguous(), seq, n, near.shape[1], q_heads, Int64(near.stride(0)),
    )  # fmt: skip
    return bound
