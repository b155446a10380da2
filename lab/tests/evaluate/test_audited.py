"""Every case measured beside the audit: what the audit found is among it, and intervals are judged by it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.engine.small import prompt, small

from coattn.auto.audit.audit import Audit, Chosen
from coattn.auto.audit.measure import Finding
from coattn.errors import InputError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.tools.evaluate.forced import force
from coattn_lab.evaluate.audited import Exhaustive, held_back, redraw, run
from coattn_lab.evaluate.ratios import Ratios

PARAMS: dict[str, Any] = {"block": 8, "window_blocks": 2}


def windows(count: int, length: int) -> torch.Tensor:
    return torch.tensor([prompt(length, seed=i) for i in range(count)])


def test_what_the_audit_found_is_among_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Chosen, Finding]] = []
    take = Audit._take

    def taken(self: Audit, chosen: Chosen, found: Finding) -> None:
        seen.append((chosen, found))
        take(self, chosen, found)

    monkeypatch.setattr(Audit, "_take", taken)
    probe = Exhaustive()
    # so that every step reads something in DRAM: a small model's tokens seldom weigh four floors
    force(
        small().cpu(), windows(2, 90), 80, "auto", score_prefill=False, probes=[probe], quality=0.7, now=1.0, **PARAMS
    )
    cases = probe.cases()
    assert cases.shape == (10, 2, 2, 2, 3)
    assert len(seen) == 20, "one of each sequence"
    for i, (chosen, found) in enumerate(seen):
        own = torch.cat([found.error, found.missed, found.estimated])
        torch.testing.assert_close(cases[i // 2, chosen.slot, chosen.layer, chosen.head], own, rtol=1e-4, atol=1e-7)
    assert len(probe.entries) == len(probe.seconds) == 10
    assert all(0 < entries <= 80 for entries in probe.entries)


def test_a_row_of_the_table() -> None:
    composed = compose(METHODS["auto"], quality=0.7, **PARAMS)
    found = run(small().cpu(), windows(2, 100), 80, composed, None)
    assert found["cases"] == 20 * 2 * 2 * 2
    assert found["audits"] == 40
    assert found["error_target"] == pytest.approx(0.3)
    assert 0 < found["error"] <= found["error_largest"]
    assert found["held_back"] == 80
    assert 0.5 < found["mass_ratio_covered"] <= 1


def test_nothing_in_dram_is_said_and_few_steps_have_no_interval() -> None:
    composed = compose(METHODS["auto"], quality=0.7, **PARAMS)
    with pytest.raises(InputError, match="With 12 tokens nothing lay in DRAM"):
        run(small().cpu(), windows(1, 12), 10, composed, None)
    found = run(small().cpu(), windows(1, 83), 80, composed, None)
    assert found["error_covered"] is None
    assert found["missed_mass_covered"] is None


def test_intervals_of_cases_that_are_all_alike_hold_the_truth() -> None:
    torch.manual_seed(0)
    cases = torch.rand(256, 2, 3, 2, 3, dtype=torch.float64)
    truth = float(cases[..., 0].mean()), float(cases[..., 1].mean())
    assert all(share > 0.93 for share in redraw(cases, 0.01, truth))
    assert all(share < 0.2 for share in redraw(cases, 0.01, (0.7, 0.7)))
    cases[..., 1] = cases[..., 2] * (0.5 + torch.rand(256, 2, 3, 2))
    found = held_back(cases)
    assert 0.92 < found["mass_ratio_covered"] < 0.98
    assert found["mass_ratio_95"] == pytest.approx([0.525, 1.475], abs=0.05)


def test_ratios_foretell_95_percent_of_a_text_that_is_a_little_different_too() -> None:
    ratios, draws = Ratios(), random.Random(2)
    for _ in range(3000):
        ratios.add(draws.lognormvariate(0, 1) * 0.01, 0.01)
    low, high = ratios.interval() or (0, 0)
    assert low < 1 < high
    others = [draws.lognormvariate(0.1, 1.1) for _ in range(4000)]
    assert 0.95 < sum(low <= x <= high for x in others) / 4000 < 0.975


def test_ratios_say_nothing_before_the_outermost_are_known() -> None:
    ratios = Ratios()
    for i in range(78):
        ratios.add(0.01 * (i + 1), 0.01)
    assert ratios.interval() is None
    ratios.add(0.79, 0.01)
    assert ratios.interval() == (1, 79)
