"""An exception in the middle of a step costs the request that is the reason, and nobody else anything.

A sample; `scripts/faults.sh` runs every case there is, and thousands at random.
"""

import random
from itertools import product
from typing import Any

import pytest
import torch
from tests.engine.faults import MORE_FAMILIES, Case, matrix, run
from tests.engine.rows import ROWS

from coattn.engine.scheduler import Scheduler
from coattn.step.runtime import Runtime

SEED = 41
PLAIN = ("first", "decode")
"""Steps that there are under every row."""
ALL = list(matrix())
OF_EVERY_ROW = [
    random.Random(SEED + i).choice([case for case in ALL if case.row == row and case.phase in PLAIN])
    for i, row in enumerate(ROWS)
]
SOME = random.Random(SEED).sample(ALL, 32)
MORE = [
    Case(row, family, phase, layer, after)
    for row, family, phase in product(("full", "cpu", "auto"), MORE_FAMILIES, ("decode", "mixed", "session", "prefix"))
    for layer, after in ((0, False), (1, True))
]
AUDITED = [Case("auto", "llama", phase, 1, after=True) for phase in ("decode", "mixed", "prefix")]
"""What a step of `auto` waits for follows from audits, which are each request's own."""
ON_GPU = random.Random(SEED).sample([case for case in matrix(captured=True) if case.phase != "disk"], 40)


def check(case: Case) -> None:
    found = run(case)
    if found is None:
        pytest.skip(f"no step of {case.row} is of this kind")
    assert not found.problems, found.problems


@pytest.mark.skipif(torch.cuda.is_available(), reason="steps that a GPU replays have cases of their own")
@pytest.mark.whole
@pytest.mark.parametrize("case", OF_EVERY_ROW, ids=str)
def test_a_step_of_every_row_may_fail(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="steps that a GPU replays have cases of their own")
@pytest.mark.parametrize("case", [*SOME, *AUDITED], ids=str)
def test_a_step_may_fail_anywhere(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="steps that a GPU replays have cases of their own")
@pytest.mark.parametrize("case", MORE, ids=str)
def test_so_may_one_of_experts_and_of_states(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_a_step_on_a_gpu_may_fail(case: Case) -> None:
    check(case)


def test_blocks_that_nobody_gives_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: Runtime, running: Any) -> None:
        running.join()

    def keeps(self: Scheduler, request: Any, whole: bool = True) -> None:
        assert request.slot is not None
        if self.store is not None:
            self.store.release(request, whole)
        self._slots.append(request.slot)
        request.slot, request.stored = None, 0

    monkeypatch.setattr(Runtime, "abort", forgets)
    monkeypatch.setattr(Scheduler, "_vacate", keeps)
    found = run(Case("full", "llama", "first", 1, after=True))
    assert any("leak" in problem for problem in found.problems)


def test_wrong_answers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that was written over is taken for whole."""
    monkeypatch.setattr("coattn.cache.layout.recent.RecentTokens.overwrites", lambda *_: False)
    found = run(Case("full", "gemma3", "mixed", 2, after=True, nth=2))
    assert any("victim" in problem for problem in found.problems)
