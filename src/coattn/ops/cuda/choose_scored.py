"""Which tokens are wanted, of scores in 16 bits that lie token by token; and the bound that a score has to reach."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import Module, available, module
from coattn.types import ScoredWork

THREADS = 256
LOOK = 2 * THREADS
"""Tokens that a program looks at at a time."""


def refuses(scores: Tensor) -> str | None:
    """Why the kernel cannot take scores `[rows, kv_heads, group, n]`, or None."""
    if not available(scores.device):
        return "kernels cannot be compiled for this device"
    group = scores.shape[2]
    pad = -(-group // 2) * 2
    if scores.dtype != torch.float16 or group > 8 or scores.stride()[1:] != (pad * scores.shape[3], 1, pad):
        return "scores do not lie token by token in 16 bits"
    return None


def choose_scored(work: ScoredWork, touch: float, ids: Tensor, count: Tensor, tail: Tensor) -> None:
    """Writes wanted tokens, how many, and what the others weigh."""
    (rows, kv_heads, group, n), pool = work.scores.shape, work.pool
    _module(group, ids.device).launch(
        "choose_scored", (count.shape[2], kv_heads, rows), THREADS,
        work.scores, work.offset, work.bound, work.tokens, work.seq, pool.place_of, pool.age, pool.clock,
        ids, count, tail, float(touch), n, pool.place_of.shape[-1], pool.age.shape[-1],
    )  # fmt: skip


def bound_scores(parts: Tensor, near: Tensor, floors: Tensor) -> Tensor:
    """parts, near: lse `[rows, n, q_heads]` float32 -> `[rows, q_heads]`, that of all and floors `[rows]`."""
    rows, n, q_heads = parts.shape
    bound = torch.empty(rows, q_heads, dtype=torch.float32, device=parts.device)
    _module(1, parts.device).launch(
        "bound_scores", (-(-q_heads // (THREADS // 32)), rows, 1), THREADS,
        parts, near.contiguous(), bound, floors, n, near.shape[1], q_heads,
    )  # fmt: skip
    return bound


def _module(group: int, device: torch.device) -> Module:
    return module("choose_scored.cu", (("THREADS", THREADS), ("GROUP", group)), device)
