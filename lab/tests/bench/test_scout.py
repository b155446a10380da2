"""The ScoutAttention paper's figures as benchmarks: their cases, what fits, and the command."""

from __future__ import annotations

import pytest
import torch
from lab.tests.run import coattn_lab

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime
from coattn.types import LayerShape
from coattn_lab.bench.decode import Case
from coattn_lab.bench.drift import noise_for
from coattn_lab.bench.scout import FIGURES, Asked, Fits, scout, speedups

SHAPES = [LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))] * 3
TOKEN = 3 * 2 * 2 * 16 * 4
ASKED = Asked((1024, 4096), (2, 4), 256, 0.1, 0.05, {})


@pytest.mark.parametrize("figure", list(FIGURES))
def test_cases_cover_what_was_asked(figure: str) -> None:
    cases = FIGURES[figure](ASKED, Fits(SHAPES, None, None))
    assert {case.context for case in cases} == {1024, 4096}
    assert max(case.batch for case in cases) == 4
    assert all((case.drift is not None) == (case.method == "scout") for case in cases)
    kinds = {(c.method, c.batch, c.context, str(c.params), c.schedule) for c in cases}
    assert len(kinds) == len(cases), "none twice"
    for case in cases:
        compose(find_method(case.method), **case.params)


def test_the_ablation_has_every_combination() -> None:
    cases = FIGURES["12"](ASKED, Fits(SHAPES, None, None))
    found = {(case.schedule, case.params["recall_interval"], case.age) for case in cases}
    assert found == {("same_layer", 0, 256), ("same_layer", 8, 0), (None, 0, 256), (None, 8, 0)}


@pytest.mark.parametrize("method", ["full", "quest", "scout"])
def test_what_fits_is_what_a_runtime_takes(method: str) -> None:
    case = Case(method, 1, 1024, {"block": 32, **({} if method == "full" else {"budget": 256})})
    gpu, host = Fits(SHAPES, None, None).bytes(case)
    ledger = Ledger()
    runtime = Runtime(SHAPES, compose(find_method(method), **case.params), ledger, 4, 1024 + 32, fixed=True)
    assert ledger.held["gpu"] <= 4 * gpu + 32 * TOKEN
    assert ledger.held["gpu"] >= 4 * gpu * 0.7
    assert ledger.held["host"] == 4 * host
    runtime.release()


@pytest.mark.parametrize("host_dtype", ["model", "int8"])
def test_of_hgca_what_may_be_chosen_takes_room_too(host_dtype: str) -> None:
    case = Case("hgca", 1, 1024, {"block": 32, "window_blocks": 4, "capacity": 0.25, "host_dtype": host_dtype})
    runtime = Runtime(SHAPES, compose(find_method("hgca"), **case.params), Ledger(), 4, 1024 + 32, fixed=True)
    assert Fits(SHAPES, None, None).bytes(case)[1] == runtime.groups[0].cache.gpu.bytes_for(1024 + 32)["host"]
    runtime.release()


def test_the_largest_batch_fits_both_tiers() -> None:
    case = scout(ASKED, 1024)
    gpu, host = Fits(SHAPES, None, None).bytes(case)
    assert Fits(SHAPES, 3 * gpu, 10 * host).batch(case, 64) == 3
    assert Fits(SHAPES, 30 * gpu, 10 * host).batch(case, 64) == 10
    assert Fits(SHAPES, 30 * gpu, 10 * host).batch(case, 4) == 4
    assert Fits(SHAPES, gpu - 1, None).batch(case, 4) == 0


def test_noise_makes_the_change_that_was_asked_for() -> None:
    draws = torch.Generator().manual_seed(5)
    noise = noise_for(0.2, 512, 40)
    slow, first, second = torch.logit(torch.rand(3, 200, 512, generator=draws).clamp(1e-6, 1 - 1e-6))
    best = [(slow + noise * fast).topk(40, -1).indices for fast in (first, second)]
    changed = 1 - (best[0][:, :, None] == best[1][:, None, :]).any(-1).float().mean()
    assert abs(float(changed) - 0.2) < 0.03


def test_speedups_are_of_tokens_per_second() -> None:
    rows = [
        {"method": method, "batch": batch, "context": 10, "tokens_per_s": rate, "params": {}}
        for method, batch, rate in (("full", 1, 100.0), ("hgca", 4, 200.0), ("scout", 9, 600.0))
    ]
    assert {(each["over"], each["times"]) for each in speedups(rows)} == {("full", 6.0), ("hgca", 3.0)}


def test_a_figure_that_is_no_benchmark_is_refused() -> None:
    done = coattn_lab("bench", "scout", "--figure", "7")
    assert done.returncode == 2
    assert "figure 7" in done.stderr
    assert "There are: 2, 6, 3, 8" in done.stderr
