"""`bound_scores`: one small kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import module

THREADS = 256


def bound_scores(parts: Tensor, near: Tensor, floors: Tensor, guess: Tensor, above: Tensor, seq: Tensor) -> Tensor:
    """See `ops/sketch.py`."""
    rows, n, q_heads = parts.shape
    bound = torch.empty(rows, q_heads, dtype=torch.float32, device=parts.device)
    module("bound_scores.cu", (("THREADS", THREADS),), parts.device).launch(
        "bound_scores", (-(-q_heads // (THREADS // 32)), rows, 1), THREADS,
        parts, near.contiguous(), bound, floors, guess.contiguous(), above, seq, n, near.shape[1], q_heads,
    )  # fmt: skip
    return bound
