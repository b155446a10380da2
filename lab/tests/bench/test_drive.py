"""Drawn scores: they change at the stated rate, the kernel draws what the reference draws, a rule picks by them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.kernels.digest import CHUNK, Scores
from coattn.kernels.lists import Rows
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.maintenance.recall.recall import Recall
from coattn.parts.select.digest_top import DigestTop
from coattn.parts.select.picks import rows_of
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step
from coattn_lab.bench.drift import Drift
from coattn_lab.bench.drive import DrivenScores, drive, drive_picks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 2
DRIFT = Drift(0.3, 40, 0.2)


def rows(n: int) -> Rows:
    """A long sequence, a short one, and a padding row."""
    numbers = [[n * 8, 24, 0], [9, 16, 0], [2, 0, 3], [0, 0, 0]]
    host, window, slots, zero = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in numbers)
    table = torch.zeros(3, n, dtype=torch.int32, device=DEVICE)
    return Rows(table, host, table, window, slots, zero, zero)


def test_scores_change_with_every_step_layer_and_prediction() -> None:
    some = rows(150)
    now, again = drive(some, HEADS, 7, DRIFT), drive(some, HEADS, 7, DRIFT)
    assert torch.equal(now, again)
    later = drive(replace(some, gpu_lens=some.gpu_lens + 1), HEADS, 7, DRIFT)
    assert not torch.isclose(now, later).any()
    assert not torch.isclose(now, drive(some, HEADS, 8, DRIFT)).any()
    right = drive(some, HEADS, 7, DRIFT._replace(wrong=0.0))
    assert 0.1 < 1 - torch.isclose(now, right).float().mean() < 0.3
    assert not torch.isclose(right, drive(some, HEADS, 7, DRIFT._replace(wrong=1.0))).any()
    # without noise a score stays for `period` steps: each of them changes 1 in 40
    slow = DRIFT._replace(noise=0.0)
    before, after = (drive(r, HEADS, 7, slow) for r in (some, replace(some, gpu_lens=some.gpu_lens + 1)))
    assert 0 < 1 - torch.isclose(before, after).float().mean() < 0.06


@pytest.mark.parametrize(("group", "n"), [(1, 9), (3, 64), (5, 300)])
@pytest.mark.parametrize("drift", [DRIFT, Drift(0.0, 1, 0.0), Drift(2.0, 500, 1.0)])
def test_the_kernel_draws_what_the_reference_draws(group: int, n: int, drift: Drift) -> None:
    pytest.importorskip("triton")
    from coattn_lab.bench.drive_kernel import drive as kernel

    some, chunks = rows(n), -(-n // CHUNK)
    layers = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    blocks, sums = (torch.zeros(2, 3, HEADS, group, width, device=DEVICE) for width in (n, chunks))
    kernel(blocks, sums, some, layers, drift)
    for i, layer in enumerate((2, 5)):
        want = drive(some, HEADS, layer, drift)
        torch.testing.assert_close(values(Scores(blocks[i], sums[i])), want, atol=1e-4, rtol=1e-4)
    on_host = Rows(*(getattr(some, field.name).cpu() for field in fields(some)))
    real = Scores(torch.full((3, HEADS, group, n), 9.0), torch.full((3, HEADS, group, chunks), 9.0))
    plain = DrivenScores(drift, [2, 5], torch.device("cpu"))
    for i, layer in enumerate((2, 5)):
        drawn = plain(layer, real, on_host)
        torch.testing.assert_close(drawn.blocks, blocks[i].cpu(), atol=1e-4, rtol=1e-4)
        assert torch.equal(drawn.sums, sums[i].cpu())


def test_scores_are_drawn_anew_when_the_first_layer_asks() -> None:
    plain = DrivenScores(DRIFT, [1, 4], torch.device("cpu"))
    some = Rows(*(getattr(rows(20), field.name).cpu() for field in fields(Rows)))
    real = Scores(torch.zeros(3, HEADS, 2, 20), torch.zeros(3, HEADS, 2, 1))
    before = [values(plain(layer, real, some)) for layer in (1, 4)]
    later = replace(some, gpu_lens=some.gpu_lens + 1)
    after = [values(plain(layer, real, later)) for layer in (1, 4)]
    assert not any(torch.isclose(a, b).any() for a, b in zip(before, after, strict=True))


def values(scores: Scores) -> Tensor:
    """A KV head's score of a block: the log of the sum of its query heads' shares."""
    return (scores.blocks - scores.sums.logsumexp(-1, keepdim=True)).logsumexp(2)


def test_a_rule_picks_by_drawn_scores_and_misses_what_has_changed_since() -> None:
    shape = LayerShape(6, 2, 16, torch.float32, torch.device("cpu"))
    row = compose(METHODS["scout"], block=4, budget=48, recall_interval=0, sink_blocks=0)
    runtime = Runtime([shape], row, Ledger(), 2, 400)
    q, k, v = (torch.randn(600, heads, 16) for heads in (6, 2, 2))
    running = runtime.begin(Step.of((0, 1), (0, 0), (300, 300)))
    runtime.attend(running, 0, q, k, v, 0.25)
    runtime.commit(running)
    group = runtime.groups[0]
    rule, maintenance = group.select, group.maintenance
    assert isinstance(rule, DigestTop)
    assert isinstance(maintenance, Recall)
    maintenance._new.clear()
    drift = Drift(0.0, 100, 0.0)
    missed = []
    for age in (0, 10, 1000):
        drive_picks(group, drift, (0, 1), 301, age)
        running = runtime.begin(Step.of((0, 1), (300, 300), (1, 1)))
        runtime.attend(running, 0, *(torch.randn(2, heads, 16) for heads in (6, 2, 2)), 0.25)
        picks, table = rule.picks, running.tables[0]
        assert picks is not None
        lists = picks.made[0]
        in_dram = table.column("host_lens")[0] // 4
        scores = drive(rows_of(table), 2, 0, drift)[..., :in_dram]
        assert torch.equal(lists.chosen[:2].long(), scores.topk(10, -1).indices.sort(-1).values)
        missed.append(int(lists.host_lens[:2].sum()) // 4)
        runtime.commit(running)
        runtime.truncate(0, 301, 300)
        runtime.truncate(1, 301, 300)
        maintenance._new.clear()
    assert missed[0] == 0
    assert 0 < missed[1] < missed[2]
    assert math.isclose(missed[2], 40, rel_tol=0.3), "of ten blocks of four heads nearly all"
