"""Scores of sketches on tensor cores against PyTorch."""

import math
from dataclasses import replace

import pytest
import torch
from tests.kernels.cards import CARDS, fits
from tests.kernels.cuda.rounded import check_rounded, rounded
from tests.kernels.pools import copied

from coattn.kernels.attend_scored import attend_scored
from coattn.kernels.cuda import bound_scores, nvrtc
from coattn.kernels.cuda import score_sketch as cuda
from coattn.kernels.cuda.nvrtc import FOLDER
from coattn.kernels.pool_memory import FRESH, PoolTensors
from coattn.kernels.quantise.sketch import WORD, Scan, Sketched, Sketcher, fit, spread_of
from coattn.kernels.rest import Rest, sum_rest
from coattn.kernels.scored_entries import SPLITS, ScoredEntries, Taken
from coattn.kernels.sketch import score_sketch
from coattn.units import ceil_div

KV_HEADS = 2


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("words", "group"), [(4, 5), (8, 5), (8, 16), (12, 3), (16, 2), (16, 16)])
def test_compiles(words: int, group: int, card: int) -> None:
    q, kept = torch.zeros(1, 2 * group, 16 * words, dtype=torch.bfloat16), torch.zeros(1, 2, 32, words)
    form = cuda.constants(q, kept, 1 << (15 + min(words // 4, 2)), 30.0 if words == 4 else None)
    assert form["GROUP"] == group
    assert form["THREADS"] == 32 * min(words, 8)  # of 65,536 and of 131,072 tokens
    form |= {"WARPS": cuda.WARPS}
    source = (FOLDER / "score_sketch.cu").read_text()
    assert fits(source, form, card, max(form["THREADS"], 32 * cuda.WARPS, 32 * words))
    bounds = (FOLDER / "bound_scores.cu").read_text()
    assert fits(bounds, {"THREADS": bound_scores.THREADS}, card, bound_scores.THREADS)


@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("n", [512, 32768, 65536, 131072, 262144, 1 << 20])
@pytest.mark.parametrize("pairs", [2, 8, 80, 424])
def test_chunks_are_whole_blocks_and_few_rounds(pairs: int, n: int, block: int) -> None:
    chunk = cuda.chunk_of(pairs, n, block)
    warps, threads = pairs * n / chunk, cuda.threads_of(pairs, n, chunk)
    assert chunk % block == chunk % cuda.TILE == 0
    assert warps <= cuda.AT_ONCE or warps > 1.3 * cuda.AT_ONCE
    assert cuda.THREADS <= threads <= cuda.MOST
    if pairs == 8 and n <= 262144:
        assert n <= SPLITS * threads * cuda.EACH  # one round


def test_refused_without_a_gpu() -> None:
    pool = PoolTensors.make(torch.zeros(2, 2, 2, 32, 64), 0, 2, 64, 32, 4)
    assert cuda.refuses(torch.zeros(1, 4, 64), torch.zeros(3, 2, 32, 4), pool) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "group", "block", "cap", "dtype"),
    [
        (64, 7, 32, None, torch.bfloat16),
        (128, 5, 32, None, torch.float16),
        (128, 8, 16, 30.0, torch.bfloat16),
        (128, 16, 32, None, torch.bfloat16),
        (256, 2, 32, None, torch.bfloat16),
        (256, 16, 32, 50.0, torch.float16),
        (80, 11, 16, None, torch.bfloat16),
        (192, 1, 32, None, torch.bfloat16),
    ],
)
def test_scores_are_those_of_the_reference(
    d: int, group: int, block: int, cap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    planes, rows, blocks, width, scale = ceil_div(2 * d, 128) * 128, 3, 40, 70, d**-0.5
    # channels of very different spread, as keys have, and far from zero: scores have a thousand in common
    keys = torch.randn(600, KV_HEADS, d) * torch.logspace(0.5, -1, d) + 60 * torch.randn(KV_HEADS, d)
    made = fit(spread_of(keys[:300], None), planes)
    sketcher = replace(made, of=made.of.to(dtype), worth=made.worth.to(dtype))
    of_block = torch.stack([keys[i : i + block] for i in range(blocks)])
    kept = torch.stack([made.encode(x) for x in of_block]).transpose(1, 2).contiguous()
    table = torch.randint(0, blocks, (rows, width), dtype=torch.int32)
    tokens = torch.tensor([width * block, 0, 9 * block], dtype=torch.int32)
    seq = torch.tensor([2, 3, 0], dtype=torch.int32)
    q = (torch.randn(rows, KV_HEADS * group, d) * 2).to(dtype)
    pool = PoolTensors.make(
        torch.zeros(4 * 4, KV_HEADS, 2, block, d, dtype=dtype), 0, 4, width * block, 4 * block, KV_HEADS * group
    )
    pool.place_of[2, 1, 5:400:3] = 4
    pool.est_lse[2], pool.true_lse[2, :3] = torch.randn(KV_HEADS * group), torch.randn(3, KV_HEADS * group)
    sketched = Sketched(kept, table, tokens, sketcher, seq)
    want_guess = score_sketch(q, sketched, scale, cap, copied(pool))().guess
    want, want_lse, want_inside, own_guess, want_off = score_sketch(q, rounded(sketched), scale, cap, pool)()
    assert isinstance(want, torch.Tensor)
    here = [x.cuda() for x in (q, kept, table, tokens)]
    there = Sketched(*here[1:], Sketcher(*(x.cuda() for x in sketcher.tensors())), seq.cuda())
    there_too = copied(pool, "cuda")
    assert cuda.refuses(here[0], here[1], there_too) is None
    got, lse, inside, guess, off = score_sketch(here[0], there, scale, cap, there_too)()
    assert isinstance(got, Scan)
    assert got.shape == want.shape
    real = (torch.arange(width * block) < tokens[:, None])[:, None]
    assert planes == kept.shape[3] * WORD
    torch.testing.assert_close(guess.cpu(), want_guess, atol=1e-3, rtol=1e-4)
    # the highest of a group's, less what is guessed; as a power of two in 16 bits
    highest = (want - guess.cpu().view(rows, KV_HEADS, group, 1)).amax(2)
    real = real.expand_as(highest)
    best = there_too.last_margin[seq.cuda().long(), :, : width * block].float().cpu()
    held = pool.place_of[seq.long(), :, : width * block] >= 0
    check_rounded(best[real & ~held] * math.log(2), highest[real & ~held], got, more=2**-11)
    assert (best[real & held] == -60000).all()
    check_rounded(lse.logsumexp(1).cpu(), want_lse.logsumexp(1), got)
    torch.testing.assert_close(off.cpu(), want_off, atol=1e-3, rtol=1e-3)
    assert (off[0] != 0).all()
    # what weighs a millionth of the rest is not told from nothing
    far = want_inside.logsumexp(1) > want_lse.logsumexp(1) - 9
    assert far.any()
    check_rounded(inside.logsumexp(1).cpu()[far], want_inside.logsumexp(1)[far], got)

    # about one in twenty is wanted; those near the bound may fall to either side
    bound = want_lse.logsumexp(1) - torch.tensor([5.0, 0.0, 3.0])[:, None]
    bound[1] = 0.0
    # keys are those that were sketched, so that a token near the bound weighs about the same on either side of it
    values = torch.randn(blocks, KV_HEADS, block, d)
    memory = torch.stack((of_block.transpose(1, 2), values), 2).to(dtype).contiguous()
    sums = sum_rest(*memory.permute(2, 0, 3, 1, 4).flatten(1, 2), sketcher).repeat(4, 1, 1)
    rest, rest_there = Rest(sums, sketcher), Rest(sums.cuda(), there.sketcher)

    def check_counts(taken: Taken, bound: torch.Tensor, now: float) -> None:
        margin = (want - bound.view(rows, KV_HEADS, group, 1)).amax(2).masked_fill(~real | held, -99.0)
        for count, low, high in ((taken.far, now, 1e9), (taken.later, 0.0, now)):
            least, most = (((margin >= low + s) & (margin < high - s)).sum((0, 2)) for s in (0.3, -0.3))
            own = count.sum((0, 2)).cpu()
            assert (least <= own).all(), low
            assert (own <= most.clamp_max(FRESH * count.shape[2] * rows)).all(), low

    for now in (0.0, 1.0):
        args, wait = (table, tokens, want, bound, rest, seq), torch.full((rows,), now, device="cuda")
        first = attend_scored(
            q[:, None], memory, ScoredEntries(*args, torch.full((rows,), now), 0.0), copied(pool), scale, cap
        )
        work = ScoredEntries(here[2], here[3], got, bound.cuda(), rest_there, seq.cuda(), wait, 0.0)
        second = attend_scored(here[0][:, None], memory.cuda(), work, copied(there_too, "cuda"), scale, cap)
        check_counts(second, bound, now)
        assert int((first.far + first.later).sum()) > 30
        # the kernel takes what is attended off the sum of all: of a rest below 1e-5 of it nothing is left
        a, b = first.states.merged(), second.states.merged()
        least = (want_lse.logsumexp(1) - 9.0)[[0, 2], None]
        got_lse, own = (x.lse.cpu()[[0, 2]].maximum(least) for x in (b, a))
        torch.testing.assert_close(got_lse, own, atol=0.1, rtol=0.01)

    # a bound is known now, and by it which tokens of the pool are wanted
    pool.bound_margin[seq.long()] = bound - own_guess
    there_too.bound_margin[seq.cuda().long()] = bound.cuda() - guess
    score_sketch(q, rounded(sketched), scale, cap, pool)()
    again = score_sketch(here[0], there, scale, cap, there_too)().scores
    assert pool.age[2, 1, 4] == 1
    assert there_too.age.cpu().equal(pool.age)
    for lower in (-1.0, 0.0, 1.0, 3.0):
        pools, own = copied(there_too, "cuda"), bound - lower
        work = ScoredEntries(here[2], here[3], again, own.cuda(), rest_there, seq.cuda(), wait, 0.0)
        check_counts(attend_scored(here[0][:, None], memory.cuda(), work, pools, scale, cap), own, 1.0)
