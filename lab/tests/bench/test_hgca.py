"""The HGCA paper's figures as benchmarks: their cases, what is compared, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.tests.run import coattn_lab

from coattn_lab.bench.hgca import FIGURES, Asked, speedups

ASKED = Asked((1, 2), (512, 1024), 128, (0.1, 0.5))


@pytest.mark.parametrize("figure", list(FIGURES))
def test_cases_cover_what_was_asked(figure: str) -> None:
    cases = FIGURES[figure](ASKED)
    assert {case.batch for case in cases} == {1, 2}
    assert len({case.context for case in cases}) >= 2
    assert all(case.kept == (0.1, 0.5) for case in cases if case.method == "hgca")
    assert len(cases) == len({(c.method, c.batch, c.context, str(c.params)) for c in cases}), "none twice"


def test_speedups_compare_rows_of_the_same_conditions() -> None:
    def row(method: str, ms: float, window: int) -> dict[str, object]:
        return {"method": method, "batch": 1, "context": 10, "params": {"window_blocks": window}, "ms_per_step": ms}

    found = speedups([row("offload", 8.0, 1), row("hgca", 2.0, 1), row("hgca", 1.0, 2)])
    assert [(each["window"], each["times_offload"]) for each in found] == [(32, 4.0)]


def test_the_command_writes_rows_and_a_figure(tmp_path: Path) -> None:
    target = tmp_path / "hgca.json"
    size = ["--shapes", "tiny", "--batch", "1", "--context", "256", "--window", "64", "--steps", "5"]
    done = coattn_lab("bench", "hgca", "--figure", "11", *size, "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["method"] for row in found["rows"]] == ["hgca"]
    assert 0 < found["rows"][0]["cpu_ratio"] < 1
    assert set(found["rows"][0]["layer_us"]) == {"gpu", "cpu", "wait"}
    assert json.loads(target.read_text())["figure"] == "11"
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_is_no_benchmark_is_refused() -> None:
    done = coattn_lab("bench", "hgca", "--figure", "9")
    assert done.returncode == 2
    assert "figure 9" in done.stderr
    assert "6, 10, 11, 12, 13, 15" in done.stderr
