"""`http_against_llm.py`: every token comes through the server, too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "scripts" / "http_against_llm.py"


@pytest.mark.slow
def test_both_ways_and_their_ratio() -> None:
    pytest.importorskip("uvicorn")
    main = runpy.run_path(str(SCRIPT))["main"]
    words = ["--shapes", "tiny", "--requests", "5", "--prompt", "9", "--new", "6", "--batch", "2", "--device", "cpu"]
    lines = CliRunner().invoke(main, words, catch_exceptions=False).output.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["LLM", "HTTP", "ratio"]
    assert float(lines[2].split()[1].rstrip(",")) > 0
