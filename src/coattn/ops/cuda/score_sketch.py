"""`score_sketch` on tensor cores: bits of keys are operands as they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import Int64, available, module
from coattn.quantise.sketch import Scores, Sketcher

WARPS = 4
CHUNK = 256
"""Tokens a warp scores."""
WORDS = (4, 8)
"""Numbers of a key that there is a form for: 128 planes, or 256."""


def refuses(q: Tensor, kept: Tensor) -> str | None:
    """Why the kernel cannot take sketches `[blocks, kv_heads, block, words]`, or None."""
    if not available(q.device):
        return "kernels cannot be compiled for this device"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}"
    if kept.shape[3] not in WORDS or q.shape[1] // kept.shape[1] > 8 or q.shape[2] % 8 or kept.shape[2] % 16:
        return "heads or blocks have no form that fits"
    if q.stride(2) != 1 or not kept.is_contiguous():
        return "the operands are not contiguous"
    return None


def score_sketch(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    sketcher: Sketcher,
    seq: Tensor,
    scale: float,
    softcap: float | None,
    place_of: Tensor,
) -> Scores:
    """See `ops/sketch.py`; scores past a row's tokens are not written."""
    (rows, q_heads, d), (_, kv_heads, block, words) = q.shape, kept.shape
    group, n = q_heads // kv_heads, table.shape[1] * block
    pad, chunks = -(-group // 2) * 2, -(-n // CHUNK)
    out = torch.empty(rows, kv_heads, n, pad, dtype=torch.float16, device=q.device)
    lse = torch.empty(rows, chunks, q_heads, dtype=torch.float32, device=q.device)
    operand = torch.empty(rows, kv_heads, words, 2, 32, dtype=torch.int32, device=q.device)
    scales = torch.empty(rows, kv_heads, 8, words // 4, dtype=torch.float32, device=q.device)
    rest = torch.empty(rows, kv_heads, 8, dtype=torch.float32, device=q.device)
    constants = {
        "WARPS": WARPS, "WORDS": words, "GROUP": group, "BLOCK": block, "CHUNK": CHUNK, "D": d,
        "F16": int(q.dtype == torch.float16), "CAP": int(softcap is not None),
    }  # fmt: skip
    made = module("score_sketch.cu", tuple(constants.items()), q.device)
    made.launch(
        "weigh_planes", (kv_heads, rows, 1), words * 32, q, sketcher.worth, sketcher.base, seq, operand, scales, rest,
        float(scale), Int64(q.stride(0)), Int64(q.stride(1)),
    )  # fmt: skip
    made.launch(
        "score_sketch", (-(-chunks // WARPS), kv_heads, rows), WARPS * 32,
        operand, scales, rest, kept, table, tokens, seq, place_of, out, lse, float(softcap or 1.0), n, chunks,
        place_of.shape[-1], Int64(kept.stride(0)), Int64(kept.stride(1)), Int64(table.stride(0)),
    )  # fmt: skip
    return Scores(out[..., :group].transpose(2, 3), lse, None if softcap is not None else rest)
