"""Kernels of `auto` and `scout` as they stand, on a CPU thread by thread, against PyTorch: where there is no GPU."""

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels.cuda.emulator import modules
from tests.kernels.cuda.rounded import check_rounded, rounded
from tests.kernels.cuda.test_score_digest import check_scores
from tests.kernels.pools import copied
from torch import Tensor

from coattn.kernels.cuda import bound_scores as bounds
from coattn.kernels.cuda import score_digest as digests
from coattn.kernels.cuda import score_sketch as cuda
from coattn.kernels.pool_memory import COLD, FRESH, PoolTensors
from coattn.kernels.quantise.sketch import Scores, Sketched, fit, spread_of
from coattn.kernels.rest import Rest, width
from coattn.kernels.scored_entries import Chosen, ScoredEntries
from coattn.kernels.sketch import _score, bound_scores, score_sketch
from coattn.units import ceil_div

KV_HEADS, SPLITS = 2, 2
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    module = modules(tmp_path_factory.getbasetemp())
    for one in (cuda, bounds, digests):
        monkeypatch.setattr(one, "module", module)
    if shutil.which("g++") is None:
        return
    pytest.importorskip("triton")
    from coattn.kernels.cuda import attend_pool

    monkeypatch.setattr(attend_pool, "module", module)
    card = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)


class World:
    """Three sequences, of which one has nothing to choose from, over sketches of keys as models have them."""

    def __init__(self, d: int, group: int, block: int, cap: float | None, dtype: torch.dtype, planes: int) -> None:
        torch.manual_seed(0)
        self.width, blocks, self.group, rows = 384 // block, 20, group, 3
        common = 60 if cap is None else 2
        keys = torch.randn(600, KV_HEADS, d) * torch.logspace(0.5, -1, d) + common * torch.randn(KV_HEADS, d)
        made = fit(spread_of(keys[:300], None), planes)
        sketcher = replace(made, of=made.of.to(dtype), worth=made.worth.to(dtype))
        kept = torch.stack([made.encode(keys[i * 7 : i * 7 + block]) for i in range(blocks)]).transpose(1, 2)
        table = torch.randint(0, blocks, (rows, self.width), dtype=torch.int32)
        self.n = self.width * block
        # the last one ends within a piece of 32
        self.tokens = torch.tensor([self.n, 0, 200], dtype=torch.int32)
        self.seq = torch.tensor([2, 3, 0], dtype=torch.int32)
        self.q = (torch.randn(rows, KV_HEADS * group, d) * 2).to(dtype)
        gpu = torch.zeros(16, KV_HEADS, 2, block, d, dtype=dtype)
        self.pool = PoolTensors.make(gpu, 0, 4, self.n, 4 * block, KV_HEADS * group, packed=True)
        self.pool.place_of[2, 1, 5:300:3] = torch.arange(99).to(torch.int16) % (4 * block)
        self.pool.place_of[0, 0, 150:160] = torch.arange(10).to(torch.int16)
        self.pool.place_of[2, 1, 5:300:9] += COLD
        self.pool.place_of[0, 0, 155:160] += COLD
        self.pool.est_lse[2], self.pool.true_lse[2, :3] = (
            torch.randn(KV_HEADS * group),
            torch.randn(3, KV_HEADS * group),
        )
        keys = Sketched(kept.contiguous(), table, self.tokens, sketcher, self.seq)
        self.args = (self.q, keys, d**-0.5, cap)
        self.rest = Rest(torch.zeros(4, KV_HEADS, width(d)), sketcher)
        self.there = (torch.arange(self.n) < self.tokens[:, None])[:, None].expand(-1, KV_HEADS, -1)

    def both(self) -> tuple[Scores, Scores, PoolTensors]:
        """What PyTorch says and what the kernels do, which have a pool of their own; of PyTorch's scores those of the
        pool too."""
        other = copied(self.pool)
        weighed = cuda.weigh(*self.args, other)
        q, keys, *rest = self.args
        about = score_sketch(*self.args, copied(self.pool))().guess
        scores = _score(q, rounded(keys), *rest, self.pool).scores
        want = score_sketch(q, rounded(keys), *rest, self.pool)()._replace(scores=scores, guess=about)
        return want, cuda.score(weighed, other), other

    def chosen(self, found: Scores, bound: Tensor, pool: PoolTensors, now: Tensor, far: float) -> tuple[Tensor, Tensor]:
        """Which tokens come at once and later, and which are looked up; and what is left."""
        rows, heads = len(self.seq), KV_HEADS
        ids = torch.full((rows, heads, self.n), -1, dtype=torch.int32)
        later = torch.full((rows, heads, SPLITS, FRESH), -1, dtype=torch.int32)
        count = torch.zeros(rows, heads, SPLITS, 3, dtype=torch.int32)
        tail = torch.full((rows, SPLITS, heads * self.group), -torch.inf)
        chunk = found.scores.chunk  # type: ignore[union-attr]
        work = ScoredEntries(self.args[1].table, self.tokens, found.scores, bound, self.rest, self.seq, now, far)
        cuda.choose_scored(work, pool, Chosen(ids, later, count, self.tokens, chunk), tail)
        marks = torch.zeros(3, rows, heads, self.n, dtype=torch.bool)
        for row in range(rows):
            each = ceil_div(ceil_div(int(self.tokens[row]), chunk), SPLITS) * chunk
            for head in range(heads):
                for split in range(SPLITS):
                    here, coming, near = count[row, head, split].tolist()
                    end = min(split * each + each, int(self.tokens[row]))
                    for which, some in enumerate((
                        ids[row, head, split * each : split * each + here],
                        later[row, head, split, :coming],
                        ids[row, head, end - near : end],
                    )):  # fmt: skip
                        assert not marks[which, row, head, some.long()].any()
                        marks[which, row, head, some.long()] = True
        return marks, tail.logsumexp(1)


CASES = [
    (64, 7, 32, None, torch.bfloat16, 128),
    (128, 5, 32, None, torch.float16, 256),
    (128, 8, 16, 30.0, torch.bfloat16, 256),
    (128, 16, 32, None, torch.bfloat16, 256),
    (256, 2, 32, None, torch.bfloat16, 512),
    (80, 11, 16, None, torch.float16, 256),
    (192, 6, 32, 30.0, torch.bfloat16, 384),
    (192, 1, 32, None, torch.bfloat16, 384),
]
FORMS = ((128, 128), (32, 96), (288, 128), (64, 128), (128, 96), (32, 128), (64, 96), (64, 128))
"""Threads of a program that chooses, and tokens of a warp."""


@compiler
@pytest.mark.parametrize(("case", "form"), [*zip(CASES, FORMS, strict=True)])
def test_scores_bounds_and_choices(
    case: tuple[Any, ...], form: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "threads_of", lambda *_: form[0])
    monkeypatch.setattr(cuda, "chunk_of", lambda *_: form[1])
    world = World(*case)
    pool, group, seq, there = world.pool, world.group, world.seq, world.there
    for _ in range(2):  # first without a bound, then with the first one's
        above, before = pool.bound_margin[seq.long()].clone(), pool.age.clone()
        held, cold = pool.hot(seq, world.n), pool.place_of[seq.long(), :, : world.n] >= COLD
        want, got, other = world.both()
        scores = want.scores
        torch.testing.assert_close(got.guess, want.guess, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(got.off, want.off, atol=1e-3, rtol=1e-3)
        assert (got.off[0] != 0).all()
        base = (got.guess + torch.where(above.isfinite(), above, 0.0)).view(3, KV_HEADS, group, 1)
        highest = ((scores - base) / math.log(2)).amax(2)
        best = other.last_margin[seq.long(), :, : world.n].float()
        outside = there & ~held
        scan: Any = got.scores
        check_rounded(best[outside] * math.log(2), highest[outside] * math.log(2), scan, more=2**-11)
        assert (best[there & held] == -60000).all()
        for one, two in ((got.lse, want.lse), (got.inside, want.inside)):
            one, two = one.logsumexp(1), two.logsumexp(1)
            near = two > torch.maximum(want.lse, want.inside).logsumexp(1) - 9  # a millionth is not told from nothing
            check_rounded(one[near], two[near], scan)
        # which tokens of the pool are wanted: those near the border may be or not
        young, sure = (other.age != before), highest / 1.4427 + 1.0986
        for row, slot in enumerate(seq.tolist()):
            for head in range(KV_HEADS):
                places = pool.place_of[slot, head, : world.n].long()
                places = torch.where(places >= COLD, places - COLD, places)
                own = (places >= 0) & there[row, head] & above.isfinite().all()
                hit = torch.zeros(pool.age.shape[-1], 2, dtype=torch.bool)
                for token in own.nonzero()[:, 0].tolist():
                    hit[places[token], 0] |= bool(sure[row, head, token] > 0.3)
                    hit[places[token], 1] |= bool(sure[row, head, token] > -0.3)
                assert (young[slot, head] >= hit[:, 0]).all()
                assert (young[slot, head] <= hit[:, 1]).all()

        # touched tokens are cold no more: those near the border may be or not
        assert (other.place_of != pool.place_of).float().mean() < 0.02
        assert (other.place_of % COLD == pool.place_of % COLD).all()
        warmed = int((cold & other.hot(seq, world.n)).sum())
        least = int((cold & there & (sure > 0.3)).sum())
        assert warmed >= max(1, least) if above.isfinite().any() else not warmed
        near_lse, floors = torch.randn(3, 5, KV_HEADS * group)[:, 1:4], torch.tensor([-5.0, -1.0, -3.0])
        whole_lse = want.lse.logsumexp(1)[:, None]
        near_lse = near_lse + torch.where(whole_lse.isfinite(), whole_lse, -100.0)
        exact = Scores(want.scores, want.lse, want.inside, want.guess, want.off)
        for whole in (True, False):
            one, two = copied(pool), copied(pool)
            bound = bound_scores(exact, near_lse, floors, one, seq, whole)
            found = bounds.bound_scores(exact, near_lse, floors, two, seq, whole)
            torch.testing.assert_close(found, bound, atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(two.bound_margin, one.bound_margin, atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(two.est_lse, one.est_lse, atol=1e-3, rtol=1e-4)

        # the last wants everything
        for now, far, lower in ((1.0, 0.0, 0.0), (2.0, 1.0, 1.0), (0.0, 0.0, 2.0), (0.5, 0.0, math.inf)):
            own = bound - lower
            margin = (scores - own.view(3, KV_HEADS, group, 1)).amax(2)
            used, wait = copied(other), torch.tensor([now, now + 0.5, now])
            (at_once, later, near), left = world.chosen(got, own, used, wait, far)
            wait = wait[:, None, None]
            # what is looked up is young, and cold no more
            assert not (near & (used.place_of[seq.long(), :, : world.n] >= COLD)).any()
            assert (near | ~(cold & used.hot(seq, world.n)) | other.hot(seq, world.n)).all()
            for row, head, token in near.nonzero().tolist():
                slot = int(seq[row])
                assert used.age[slot, head, used.place_of[slot, head, token]] == used.clock[slot, head]
            away = outside & ~cold
            assert (at_once <= ((margin > wait - 0.3) & away)).all()
            assert (((margin > wait + 0.3) & away) <= at_once).all()
            assert (later <= ((margin > far - 0.3) & (margin < wait + 0.3) & away)).all()
            assert (((margin > far + 0.3) & (margin < wait - 0.3) & away) <= later).all()
            assert (near <= ((margin > -0.3) & cold & there)).all()
            assert (((margin > 0.3) & cold & there) <= near).all()
            rest = scores.masked_fill((at_once | near | held)[:, :, None], -torch.inf).logsumexp(-1).flatten(1)
            seen = rest > want.lse.logsumexp(1) - 7
            check_rounded(left[seen], rest[seen], scan)
        pool.bound_margin.copy_(one.bound_margin)


SHAPES = [
    (64, 3, None, torch.float16),
    (128, 5, 30.0, torch.bfloat16),
    (128, 16, None, torch.bfloat16),
    (256, 2, None, torch.bfloat16),
    (80, 12, None, torch.float16),
    (176, 1, 30.0, torch.bfloat16),
]


@compiler
@pytest.mark.parametrize(("d", "group", "cap", "dtype"), SHAPES)
def test_attention_over_window_and_pool(d: int, group: int, cap: float | None, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cuda.test_attend_pool import check_attending

    check_attending(d, group, cap, dtype, torch.device("cpu"), places=288)


@compiler
@pytest.mark.parametrize(("d", "group", "cap", "dtype"), SHAPES)
def test_looking_up(d: int, group: int, cap: float | None, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernels.cuda.test_attend_pool import check_looking_up

    check_looking_up(d, group, cap, dtype, torch.device("cpu"))


@compiler
@pytest.mark.parametrize(
    ("n", "d", "group", "cap", "slack", "dtype"),
    [
        (131, 128, 5, None, 0.5, torch.bfloat16),
        (40, 64, 8, 30.0, 1.0, torch.float16),
        (1, 96, 1, None, 0.7, torch.float16),
    ],
)
def test_scores_of_digests(n: int, d: int, group: int, cap: float | None, slack: float, dtype: torch.dtype) -> None:
    check_scores(n, d, group, cap, slack, dtype, torch.device("cpu"))
