"""Sketches of keys: scores of a query, and the sketch of a block that has become full."""

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.cuda import bound_scores as cuda_bound
from coattn.kernels.cuda import nvrtc
from coattn.kernels.cuda import score_sketch as cuda
from coattn.kernels.operation import Operation
from coattn.kernels.pool_memory import LOG2E, TOUCH, PoolTensors
from coattn.kernels.quantise.sketch import Scores, Sketched, Sketcher, guess, unpack
from coattn.kernels.softcap import softcap as capped


def score_sketch(
    q: Tensor, keys: Sketched, scale: float, softcap: float | None, pool: PoolTensors
) -> Callable[[], Scores]:
    """q `[rows, q_heads, d]` against keys, to be called for the scores, on another stream if that is better.

    pool: which entries are attended to in it; the highest scores are noted there, and which of its tokens are wanted,
    by the last bound. On a GPU scores may be a `Scan`.
    """
    if cuda.refuses(q, keys.kept, pool) is None:
        # before attention takes all of the GPU: what waits for it is longer
        weighed = cuda.weigh(q, keys, scale, softcap, pool)
        return lambda: cuda.score(weighed, pool)

    kept, table, tokens, _, seq = keys
    off = pool.off(seq)  # before the pools are attended again

    def score() -> Scores:
        scored = _score(q, keys, scale, softcap, pool)._replace(off=off)
        scores, n = scored.scores, table.shape[1] * kept.shape[2]
        assert isinstance(scores, Tensor)
        above = pool.bound_margin[seq.long()]
        base = scored.guess + torch.where(above.isfinite(), above, 0.0)
        highest = ((scores - base.view(*scores.shape[:3], 1)) * LOG2E).amax(2)
        hot = pool.hot(seq, n)
        pool.last_margin[seq.long(), :, :n] = (
            highest.masked_fill(hot, -torch.inf).clamp(-60000, 60000).to(torch.float16)
        )
        past = torch.arange(n, device=q.device) >= tokens[:, None]
        wanted = (highest >= -TOUCH * LOG2E) & above.isfinite().all(-1)[:, None, None] & ~past[:, None]
        pool.touch(seq, wanted)
        return scored._replace(scores=scores.masked_fill(hot[:, :, None], -torch.inf))

    return score


def _score(q: Tensor, keys: Sketched, scale: float, softcap: float | None, pool: PoolTensors) -> Scores:
    if q.device.type == "cuda":
        from coattn.kernels.triton.sketch import score_sketch as kernel

        return kernel(q, keys, scale, softcap, pool)
    kept, table, tokens, sketcher, seq = keys
    (rows, q_heads, d), kv_heads = q.shape, kept.shape[1]
    worth, base = sketcher.queries(q.view(rows, kv_heads, -1, d))
    words = kept[table.long()].transpose(1, 2).flatten(2, 3)  # [rows, kv_heads, n, words]
    scores = torch.einsum("rhnp,rhgp->rhgn", unpack(words), worth) + base[..., None]
    scores = capped(scores * scale, softcap)
    past = (torch.arange(scores.shape[-1], device=q.device) >= tokens[:, None])[:, None]
    scores = scores.masked_fill(past[:, :, None], -torch.inf)
    held = pool.hot(seq, scores.shape[-1])
    lse, inside = (
        scores.masked_fill(out[:, :, None], -torch.inf).logsumexp(-1).view(rows, 1, q_heads) for out in (held, ~held)
    )
    about = guess(worth * scale, base * scale, softcap).reshape(rows, q_heads)
    return Scores(scores, lse, inside, about, torch.zeros_like(about))


def bound_scores(scores: Scores, near: Tensor, floors: Tensor, pool: PoolTensors, seq: Tensor, whole: bool) -> Tensor:
    """The scores that an entry must reach to weigh as much as a floor: `[rows, q_heads]`.

    near: lse `[rows, n, q_heads]` of pieces of what lies in GPU memory, whole or without the pool. Without, the
    sketch's estimate stands for it, by as much more or less as the last one of sequences `seq` was off: so nobody waits
    for attention over the pool. floors: `[rows]`, their logarithms. How far bounds are above `scores.guess` is noted.
    """
    if nvrtc.available(near.device):
        return cuda_bound.bound_scores(scores, near, floors, pool, seq, whole)
    slots, parts = seq.long(), [scores.lse, near]
    if not whole:
        inside = scores.inside.logsumexp(1)
        parts.append((inside + scores.off)[:, None])
        pool.est_lse[slots] = inside
    bound = torch.cat(parts, 1).logsumexp(1) + floors[:, None]
    pool.bound_margin[slots] = bound - scores.guess
    return bound


@Operation
def flush_sketch(gpu: Tensor, kept: Tensor, block: Tensor, to: Tensor, sketcher: Sketcher) -> None:
    """Codes the keys of blocks that became full.

    gpu `[n, kv_heads, 2, block, d]`, or 1 where there are no values; block, to `[rows]`: of each row its filling block,
    and where the full one went in DRAM; -1: it is not full.
    """
    full = (to >= 0).nonzero()[:, 0]
    keys = gpu[block[full].long(), :, 0].transpose(1, 2)  # [rows, block, kv_heads, d]
    if len(full):
        kept[to[full].long()] = sketcher.encode(keys.flatten(0, 1)).view(*keys.shape[:3], -1).transpose(1, 2)


@Operation
def lost(keys: Tensor, kept: Tensor, blocks: Tensor, sketcher: Sketcher) -> Tensor:
    """How far keys are from what their planes say of them, `[kv_heads, n]` float32.

    keys `[n, kv_heads, d]`, of whole blocks; blocks: int32, where in kept they are.
    """
    words = kept[blocks.long()].transpose(1, 2).flatten(0, 1)
    # head by head: planes as numbers take sixteen times what they take as bits
    told = (unpack(words[:, h], own.dtype) @ own for h, own in enumerate(sketcher.worth))
    return torch.stack([(keys[:, h].float() - x - sketcher.base[h]).norm(dim=-1) for h, x in enumerate(told)])
