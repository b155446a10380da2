"""`score_sketch` on tensor cores, where bits of keys are operands as they lie, and the choice by such scores."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import Int64, available, module
from coattn.ops.token_pool import FRESH, TokenPool
from coattn.quantise.sketch import Scan, Scores, Sketcher

WARPS = 8
"""Of a program: one for each KV head, as far as there are."""
CHUNK = 1024
"""Tokens a warp scores, at most."""
RING = 0
AHEAD = 2
"""Pieces of 32 keys on their way to a warp."""
THREADS = 256
"""Of a program that chooses."""
WORDS = (4, 8)
"""Numbers of a key that there is a form for: 128 planes, or 256."""


def refuses(q: Tensor, kept: Tensor, place_of: Tensor) -> str | None:
    """Why the kernel cannot take sketches `[blocks, kv_heads, block, words]`, or None."""
    if not available(q.device):
        return "kernels cannot be compiled for this device"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}"
    if kept.shape[3] not in WORDS or q.shape[1] // kept.shape[1] > 8 or q.shape[2] % 8 or kept.shape[2] % 16:
        return "heads or blocks have no form that fits"
    if q.stride(2) != 1 or not kept.is_contiguous() or place_of.shape[-1] % 8:
        return "the operands are not contiguous, or not aligned"
    return None


def constants(q: Tensor, kept: Tensor, softcap: float | None) -> dict[str, int]:
    """Of the kernels' form."""
    (_, q_heads, d), (_, kv_heads, block, words) = q.shape, kept.shape
    return {
        "WARPS": min(WARPS, kv_heads), "RING": RING, "WORDS": words,
        "GROUP": q_heads // kv_heads, "BLOCK": block,
        "CHUNK": min(CHUNK, 32 * block), "AHEAD": AHEAD, "THREADS": THREADS, "FRESH": FRESH, "D": d,
        "F16": int(q.dtype == torch.float16), "CAP": int(softcap is not None),
    }  # fmt: skip


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
    """See `ops/sketch.py`; what lies past a row's tokens is not written."""
    (rows, q_heads, _), (_, kv_heads, block, words) = q.shape, kept.shape
    form = constants(q, kept, softcap)
    n, chunk = table.shape[1] * block, form["CHUNK"]
    chunks = -(-n // chunk)
    best = torch.empty(rows, kv_heads, n, dtype=torch.float16, device=q.device)
    lse = torch.empty(rows, chunks, q_heads, dtype=torch.float32, device=q.device)
    operand = torch.empty(rows, kv_heads, words, 2, 32, dtype=torch.int32, device=q.device)
    scales = torch.empty(rows, kv_heads, 8, words // 4, dtype=torch.float32, device=q.device)
    rest, base = (torch.empty(rows, kv_heads, 8, dtype=torch.float32, device=q.device) for _ in range(2))
    made = module("score_sketch.cu", tuple(form.items()), q.device)
    made.launch(
        "weigh_planes", (kv_heads, rows, 1), words * 32, q, sketcher.worth, sketcher.base, seq, operand, scales, rest,
        base, float(scale), float(softcap or 1.0), Int64(q.stride(0)), Int64(q.stride(1)),
    )  # fmt: skip
    made.launch(
        "score_sketch", (chunks, -(-kv_heads // form["WARPS"]), rows), form["WARPS"] * 32,
        operand, scales, rest, base, kept, table, tokens, seq, place_of, best, lse, float(softcap or 1.0), kv_heads, n,
        chunks, place_of.shape[-1], Int64(kept.stride(0)), Int64(kept.stride(1)), Int64(table.stride(0)),
    )  # fmt: skip
    scan = Scan(best, operand, scales, rest, base, kept, table, tokens, seq, lse, chunk, softcap, made)
    return Scores(scan, lse, base[..., : q_heads // kv_heads].reshape(rows, q_heads))


def choose_scored(
    scan: Scan, bound: Tensor, pool: TokenPool, touch: float, now: float, ids: Tensor, later: Tensor, count: Tensor,
    tail: Tensor,
) -> None:  # fmt: skip
    """Writes wanted tokens, how many, and what the others weigh; see the kernel."""
    rows, kv_heads, n = scan.best.shape
    kept = scan.kept
    scan.module.launch(
        "choose_scored", (count.shape[2], kv_heads, rows), THREADS,
        scan.operand, scan.scales, scan.rest, scan.base, kept, scan.table, scan.tokens, scan.seq, pool.place_of,
        scan.best, scan.lse, bound, pool.age, pool.clock, ids, later, count, tail, float(scan.softcap or 1.0),
        float(touch), float(now), n, scan.lse.shape[1], pool.place_of.shape[-1], pool.age.shape[-1],
        Int64(kept.stride(0)), Int64(kept.stride(1)), Int64(scan.table.stride(0)),
    )  # fmt: skip
