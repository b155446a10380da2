"""`score_sketch` on tensor cores, where bits of keys are operands as they lie, and the choice by such scores."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, available, module
from coattn.kernels.pool_memory import COLD, FRESH, PIECES, TOUCH, PoolTensors
from coattn.kernels.quantise.rows import HEAD_SIZES, MAX_GROUP
from coattn.kernels.quantise.sketch import Scan, Scores, Sketched
from coattn.kernels.scored_entries import Chosen, ScoredEntries, splits_of
from coattn.kernels.triton.launch import follow
from coattn.units import ceil_div

WARPS = 8
"""Of a program: one for each KV head, as far as there are."""
CHUNKS = {1024: 8000, 512: 5000, 256: 4000, 128: 0}
"""Tokens a warp scores, and the warps that there must be: a GPU has 3,000 at a time, and more even out their ends."""
AT_ONCE, LONGEST = 3000, 384
"""Warps at a time, and the longest chunks for which all are made to run so: a second round of few would take as long as
the first."""
TILE = 32
"""Tokens of a warp at a time."""
AHEAD = 4
"""Pieces of 32 keys on their way to a warp; of keys of more than 8 numbers half as many: shared memory is small."""
THREADS, EACH = 128, 32
"""Of a program that chooses, and tokens of each at a time."""
FEW, MOST = 16, 512
"""Pairs of a sequence and a KV head up to which programs of more threads all run at a time, and how many at most."""
WORDS = (4, 8, 12, 16)
"""Numbers of a key that there is a form for: 128 planes, or up to four times as many."""


def refuses(q: Tensor, kept: Tensor, pool: PoolTensors) -> str | None:
    """Why the kernel cannot take sketches `[blocks, kv_heads, block, words]`, or None."""
    if not available(q.device):
        return "kernels cannot be compiled for this device"
    why = lacks_form(q, kept)
    if why is not None:
        return why
    apart = q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16 or pool.place_of.shape[-1] % 32
    if q.stride(2) != 1 or apart or not kept.is_contiguous():
        return "the operands are not contiguous, or not aligned"
    return None


def lacks_form(q: Tensor, kept: Tensor) -> str | None:
    """Which shape of these there is no form for, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"there is no form for {q.dtype}"
    block, words, d, group = *kept.shape[2:], q.shape[2], q.shape[1] // kept.shape[1]
    if group > MAX_GROUP or d % 16 or d > max(HEAD_SIZES):
        return f"there is no form for {group} query heads a KV head of {d} channels"
    if words not in WORDS or block % 16:
        return f"there is no form for sketches of {4 * words} bytes in blocks of {block} tokens"
    return None


def chunk_of(pairs: int, n: int, block: int) -> int:
    """Tokens that a warp scores, whole blocks, where so many pairs of a sequence and a KV head have so many each."""
    unit = math.lcm(TILE, block)
    fit = ceil_div(pairs * n, AT_ONCE * unit) * unit
    if not min(CHUNKS) < fit <= LONGEST:
        fit = next(chunk for chunk, least in CHUNKS.items() if pairs * n >= least * chunk)
    return min(ceil_div(fit, unit) * unit, 32 * block)


def threads_of(pairs: int, n: int, chunk: int) -> int:
    """Threads of a program that chooses from a piece of a sequence's tokens: more, where it would take a second
    round."""
    piece = ceil_div(ceil_div(n, chunk), splits_of(pairs)) * chunk
    return min(max(THREADS, ceil_div(piece, 32 * EACH) * 32), MOST) if pairs <= FEW else THREADS


def constants(q: Tensor, kept: Tensor, n: int, softcap: float | None) -> dict[str, int]:
    """Of the kernels' form, for sequences of so many tokens."""
    (rows, q_heads, d), (_, kv_heads, block, words) = q.shape, kept.shape
    chunk = chunk_of(rows * kv_heads, n, block)
    return {
        "WARPS": min(WARPS, kv_heads), "WORDS": words,
        "GROUP": q_heads // kv_heads, "BLOCK": block,
        "CHUNK": chunk, "AHEAD": AHEAD if words <= 8 else AHEAD // 2, "THREADS": threads_of(rows * kv_heads, n, chunk),
        "EACH": EACH,
        "FRESH": FRESH, "COLD": COLD, "PIECES": PIECES, "D": d, "F16": int(q.dtype == torch.float16),
        "CAP": int(softcap is not None),
    }  # fmt: skip


def weigh(q: Tensor, keys: Sketched, scale: float, softcap: float | None, pool: PoolTensors) -> Scores:
    """A query as the kernels have it, before anything is scored."""
    kept, table, tokens, sketcher, seq = keys
    (rows, q_heads, _), (_, kv_heads, _, words) = q.shape, kept.shape
    form = constants(q, kept, table.shape[1] * kept.shape[2], softcap)
    eights, kinds = ceil_div(form["GROUP"], 8), 1 if words == 4 else 2
    operand = torch.empty(rows, kv_heads, eights, words // 2, 2, 32, dtype=torch.int32, device=q.device)
    scales = torch.empty(rows, kv_heads, 8 * eights, kinds, dtype=torch.float32, device=q.device)
    rest, base = torch.empty(2, rows, kv_heads, 8 * eights, dtype=torch.float32, device=q.device)
    guess, off = torch.empty(2, rows, q_heads, dtype=torch.float32, device=q.device)
    made = module("score_sketch.cu", tuple(form.items()), q.device)
    made.launch(
        "weigh_planes", (kv_heads, rows, 1), words * 32, q, sketcher.worth, sketcher.base, seq, operand, scales, rest,
        base, guess, off, pool.bound_margin, pool.est_lse, pool.true_lse, float(scale), float(softcap or 1.0),
        Int64(q.stride(0)),
        Int64(q.stride(1)), follow=follow(),
    )  # fmt: skip
    scan = Scan(
        operand, scales, rest, base, kept, table, tokens, seq, None, form["GROUP"], form["CHUNK"], softcap, made
    )
    return Scores(scan, guess[:, None], guess[:, None], guess, off)


def score(weighed: Scores, pool: PoolTensors) -> Scores:
    """What `weigh` found, with scores of all tokens; what lies past a row's tokens is not written."""
    scan = weighed.scores
    assert isinstance(scan, Scan)
    rows, kv_heads, group, n = scan.shape
    kept, chunks, warps = scan.kept, -(-n // scan.chunk), min(WARPS, kv_heads)
    lse, inside = torch.empty(2, rows, chunks, kv_heads * group, dtype=torch.float32, device=kept.device)
    scan.module.launch(
        "score_sketch", (chunks, -(-kv_heads // warps), rows), warps * 32,
        scan.operand, scan.scales, scan.rest, scan.base, kept, scan.table, scan.tokens, scan.seq, pool.place_of,
        pool.last_margin, lse, inside, pool.bound_margin, pool.age, pool.clock, float(scan.softcap or 1.0), TOUCH,
        kv_heads, n,
        chunks, pool.place_of.shape[-1], pool.age.shape[-1], Int64(kept.stride(0)), Int64(kept.stride(1)),
        Int64(scan.table.stride(0)),
    )  # fmt: skip
    return Scores(replace(scan, lse=lse), lse, inside, weighed.guess, weighed.off)


def choose_scored(work: ScoredEntries, pool: PoolTensors, chosen: Chosen, tail: Tensor) -> None:
    """Writes wanted tokens, how many, and what the others weigh; see the kernel. The bound is what the kernel in front
    has just written."""
    scan = work.scores
    assert isinstance(scan, Scan)
    assert scan.lse is not None, "`score` comes first"
    (rows, kv_heads, _, n), kept = scan.shape, scan.kept
    scan.module.launch(
        "choose_scored", (chosen.count.shape[2], kv_heads, rows), threads_of(rows * kv_heads, n, scan.chunk),
        scan.operand, scan.scales, scan.rest, scan.base, kept, scan.table, scan.tokens, scan.seq, pool.place_of,
        pool.age, pool.clock, pool.last_margin, scan.lse, work.bound, chosen.ids, chosen.later, chosen.count, tail,
        float(scan.softcap or 1.0), work.sync_fetch, float(work.fetch), n, -(-n // scan.chunk),
        pool.place_of.shape[-1], pool.age.shape[-1], Int64(kept.stride(0)), Int64(kept.stride(1)),
        Int64(scan.table.stride(0)), follow=follow(),
    )  # fmt: skip
