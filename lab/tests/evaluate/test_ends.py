"""Mass at both ends of a text, and weights that move, by hand."""

from __future__ import annotations

import pytest
import torch

from coattn_lab.evaluate.ends import RECENTS, STARTS, Ends, Moved, mass_at_ends


def test_mass_at_both_ends_is_counted_once() -> None:
    weights = torch.zeros(1, 2, 100)
    weights[..., 2] = 0.25
    weights[..., 40] = 0.25
    weights[..., 99] = 0.5
    found = mass_at_ends(weights)
    at = {(s, r): float(found[i, j]) for i, s in enumerate(STARTS) for j, r in enumerate(RECENTS)}
    assert at[0, 16] == 0.5  # the newest alone
    assert at[4, 16] == 0.75
    assert at[0, 64] == 0.75  # the newest 64 have 40 and 99
    assert at[64, 64] == pytest.approx(1)  # overlapping windows do not count an entry twice
    assert at[1024, 4096] == pytest.approx(1)
    look = Ends()
    for _ in range(2):
        look.see(0, torch.empty(0), torch.empty(0), weights)
    assert look.summary()["mass"][0][1][0] == 0.75


def test_the_heaviest_entries_stay_or_go() -> None:
    first, last = torch.full((1, 2, 100), 1e-3), torch.full((1, 2, 103), 1e-3)
    first[0, :, 7] = 0.9
    last[0, 0, 7], last[0, 1, 60] = 0.9, 0.9
    look = Moved()
    for weights in (first, torch.full((1, 2, 101), 0.01), last):
        look.see(3, torch.empty(0), torch.empty(0), weights)
    found = look.summary()
    assert found["still_top"] == [0.5]  # of head 0 still the same entry, of head 1 another
    assert found["correlation"][0] == pytest.approx((1 - 1 / 99) / 2, abs=1e-9)
