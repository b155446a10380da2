"""`deterministic_cost.py`: decode steps and a prompt, with it and without."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "deterministic_cost.py"


@pytest.mark.slow
def test_a_line_for_each_method_and_batch() -> None:
    words = ["--shapes", "tiny", "--methods", "full,cpu", "--batches", "2", "--context", "200", "--steps", "4"]
    done = CliRunner().invoke(runpy.run_path(str(SCRIPT))["main"], [*words, "--device", "cpu"], catch_exceptions=False)
    lines = done.output.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["full, batch 2", "cpu, batch 2", "a prompt of 200"]
    assert all(re.search(r"usual [\d,.]+, deterministic [\d,.]+ tokens/s, -?[\d,.]+% lost", line) for line in lines)
