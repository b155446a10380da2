"""Sketches of keys: scores of a query, and the sketch of a block that has become full."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.ops.softcap import softcap as capped
from coattn.ops.token_pool import LOG2E, TokenPool
from coattn.quantise.sketch import Scores, Sketcher, guess, unpack


def score_sketch(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    sketcher: Sketcher,
    seq: Tensor,
    scale: float,
    softcap: float | None,
    pool: TokenPool,
) -> Callable[[], Scores]:
    """q `[rows, q_heads, d]` against kept `[blocks, kv_heads, block, words]` int32 of listed blocks; to be called for
    the scores, on another stream if that is better.

    table `[rows, blocks]`, tokens, seq `[rows]` int32; sketcher: of every sequence, by `seq`. pool: which entries have
    a place in it; the highest scores are noted there. On a GPU scores may be a `Scan`.
    """
    if q.device.type == "cuda":
        from coattn.ops.cuda import score_sketch as cuda

        if cuda.refuses(q, kept, pool) is None:
            # before attention takes all of the GPU: what waits for it is longer
            weighed = cuda.weigh(q, kept, table, tokens, sketcher, seq, scale, softcap, pool)
            return lambda: cuda.score(weighed, pool)

    def score() -> Scores:
        found = _score(q, kept, table, tokens, sketcher, seq, scale, softcap, pool)
        scores, n = found.scores, table.shape[1] * kept.shape[2]
        assert isinstance(scores, Tensor)
        above = pool.above[seq.long()]
        base = found.guess + torch.where(above.isfinite(), above, 0.0)
        highest = ((scores - base.view(*scores.shape[:3], 1)) * LOG2E).amax(2)
        pool.best[seq.long(), :, :n] = highest.clamp(-60000, 60000).to(torch.float16)
        return found

    return score


def peek_sketch(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    sketcher: Sketcher,
    seq: Tensor,
    scale: float,
    softcap: float | None,
    pool: TokenPool,
) -> Scores:
    """Scores of a query that is not the real one: of entries that were near a bound in the step before, others count
    nothing. Nothing is noted."""
    if q.device.type == "cuda":
        from coattn.ops.cuda import score_sketch as cuda

        if cuda.refuses(q, kept, pool) is None:
            return cuda.weigh(q, kept, table, tokens, sketcher, seq, scale, softcap, pool)
    found = _score(q, kept, table, tokens, sketcher, seq, scale, softcap, pool)
    scores = found.scores
    assert isinstance(scores, Tensor)
    near = pool.near_bound(seq, scores.shape[-1])[:, :, None]
    return Scores(scores.masked_fill(~near, -torch.inf), found.lse, found.guess)


def _score(
    q: Tensor,
    kept: Tensor,
    table: Tensor,
    tokens: Tensor,
    sketcher: Sketcher,
    seq: Tensor,
    scale: float,
    softcap: float | None,
    pool: TokenPool,
) -> Scores:
    if q.device.type == "cuda":
        from coattn.ops.triton.sketch import score_sketch as kernel

        return kernel(q, kept, table, tokens, sketcher, seq, scale, softcap, pool.place_of)
    (rows, q_heads, d), kv_heads = q.shape, kept.shape[1]
    worth, base = sketcher[seq.long()].queries(q.view(rows, kv_heads, -1, d))
    words = kept[table.long()].transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, n, words]
    found = torch.einsum("rhnp,rhgp->rhgn", unpack(words), worth) + base[..., None]
    found = capped(found * scale, softcap)
    past = (torch.arange(found.shape[-1], device=q.device) >= tokens[:, None])[:, None]
    found = found.masked_fill(past[:, :, None], -torch.inf)
    held = pool.place_of[seq.long(), :, : found.shape[-1]] >= 0
    lse = found.masked_fill(held[:, :, None], -torch.inf).logsumexp(-1).view(rows, 1, q_heads)
    return Scores(found, lse, guess(worth * scale, base * scale, softcap).view(rows, q_heads))


def bound_scores(parts: Tensor, near: Tensor, floors: Tensor, guess: Tensor, above: Tensor, seq: Tensor) -> Tensor:
    """The scores that an entry must reach to weigh as much as a floor: `[rows, q_heads]`.

    parts, near: lse `[rows, n, q_heads]` of pieces of all that there is. floors: `[rows]`, their logarithms. above
    `[slots, q_heads]`: how far the bounds of sequences `seq` are above `guess` `[rows, q_heads]` is written there.
    """
    if parts.device.type == "cuda":
        from coattn.ops.cuda import bound_scores as cuda
        from coattn.ops.cuda import nvrtc

        if nvrtc.available(parts.device):
            return cuda.bound_scores(parts, near, floors, guess, above, seq)
    bound = torch.cat([parts, near], 1).logsumexp(1) + floors[:, None]
    above[seq.long()] = bound - guess
    return bound


def flush_sketch(gpu: Tensor, kept: Tensor, block: Tensor, to: Tensor, seq: Tensor, sketcher: Sketcher) -> None:
    """Codes the keys of blocks that became full in a decode step.

    gpu `[n, kv_heads, 2, block, d]`; block, to, seq `[rows]`: of each row its filling block, where the full one went in
    DRAM (-1: it is not full), its sequence.
    """
    if gpu.device.type == "cuda":
        from coattn.ops.triton.sketch import flush_sketch as kernel

        kernel(gpu, kept, block, to, seq, sketcher)
        return
    for own, number, slot in zip(block.tolist(), to.tolist(), seq.tolist(), strict=True):
        if number >= 0:
            kept[number] = sketcher[slot].encode(gpu[own, :, 0].transpose(0, 1)).transpose(0, 1)
