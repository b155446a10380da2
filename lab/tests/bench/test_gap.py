"""`gap.py`: a line for each method and slowdown, from streams over HTTP."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from coattn.engine import chunk_policy

SCRIPT = Path(__file__).parents[2] / "scripts" / "gap.py"
OPTIONS = "--shapes tiny --long 600 --answers 2 --new 4000 --before 0.5 --slowdowns 2.5,1.5 --device cpu"


@pytest.mark.slow
def test_a_line_for_each_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(chunk_policy, "SLOWDOWN", 9.0)
    done = CliRunner().invoke(runpy.run_path(str(SCRIPT))["main"], OPTIONS.split(), catch_exceptions=False)
    lines = done.output.splitlines()
    assert [line.split(":")[0] for line in lines] == ["full at 2.5", "full at 1.5"]
    for line in lines:
        times = [float(each) for each in re.findall(r"\d+\.\d", line.partition("longest)")[2])]
        assert 0 < times[0] <= times[1] <= times[2], "median, p99, longest before"
        assert 0 < times[3] <= times[4] <= times[5], "and while the prompt was read"
        assert "600 tokens read in" in line
