"""`first_request.py`: a line for each method, and a hit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "first_request.py"


@pytest.mark.slow
def test_a_line_for_each_method() -> None:
    words = ["--shapes", "tiny", "--methods", "full,auto", "--prompt", "60", "--layers", "1", "--device", "cpu"]
    done = CliRunner().invoke(runpy.run_path(str(SCRIPT))["main"], words, catch_exceptions=False)
    assert [line.split()[0] for line in done.output.splitlines()] == ["full", "auto"]
    assert all("compiled: Triton nothing, CUDA nothing" in line for line in done.output.splitlines())
