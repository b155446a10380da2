"""Conversations whose turns go on, are taken back, lose their slot and come back answer as their text does alone.

A sample; `scripts/faults.sh OUT histories` plays thousands.
"""

from collections import Counter
from pathlib import Path

import pytest
from tests.engine.faults import MORE_FAMILIES
from tests.engine.histories import EXACT, FAMILIES, History
from tests.engine.rows import ROWS

KINDS = [(row, family) for row in ROWS for family in FAMILIES]
QUICK = [
    ("full", "gemma3"),
    ("cpu", "mistral_sliding"),
    ("hcattention", "llama"),
    ("hgca", "gpt_oss"),
    ("auto", "llama"),
]


MORE = [(row, family) for row in ("full", "cpu", "auto") for family in MORE_FAMILIES]


def play(row: str, family: str, seed: int, folder: Path) -> None:
    history = History(row, family, seed, folder, whole=row in EXACT or bool(seed % 2))
    assert not history.play()
    assert history.counts


@pytest.mark.parametrize(("row", "family"), QUICK)
def test_a_history_answers_as_its_text_does_alone(row: str, family: str, tmp_path: Path) -> None:
    play(row, family, 1, tmp_path)


@pytest.mark.slow
def test_what_may_happen_happens(tmp_path: Path) -> None:
    """Else the other tests would say nothing of it."""
    counts = Counter[str]()
    for seed in range(6):
        history = History("cpu", "llama", seed, tmp_path / str(seed), whole=True)
        assert not history.play()
        counts += history.counts
    assert counts.keys() >= {
        "append",
        "take_back",
        "fork",
        "preempted",
        "parked",
        "restored",
        "damaged",
        "left",
        "hits",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("row", "family"), MORE)
def test_so_does_one_of_experts_and_of_states(row: str, family: str, tmp_path: Path) -> None:
    play(row, family, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "family"), KINDS[::3])
def test_so_does_one_of_every_row(row: str, family: str, tmp_path: Path) -> None:
    play(row, family, 3 if row in EXACT else KINDS.index((row, family)), tmp_path)
