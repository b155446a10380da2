"""`second_token.py`: every case under two methods, and a second question that finds the text."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from coattn_lab.bench.stream import Item

SCRIPT = Path(__file__).parents[2] / "scripts" / "second_token.py"
OPTIONS = "--shapes tiny --prompts 96 --text 320 --together 2 --turns 1 --host-kv 64MiB --device cpu"


@pytest.mark.slow
def test_every_case_under_two_methods(tmp_path: Path) -> None:
    script, target = runpy.run_path(str(SCRIPT)), tmp_path / "found.json"
    script["turn"].__globals__.update(OTHER=Item(0, 64, 120), AFTER_SECONDS=0.05)
    done = CliRunner().invoke(script["main"], [str(target), *OPTIONS.split()], catch_exceptions=False)
    turns = dict(json.loads(target.read_text())["turns"])
    assert list(turns) == ["full", "auto"]
    for rows in turns.values():
        assert all(0 < row["first"] < row["second"] for row in rows.values())
        assert rows["96 beside"]["gap"] > 0
        assert rows["first question on 320"]["found_tokens"] == 0
        assert rows["second question on 320"]["found_tokens"] >= 320
    assert len(done.output.splitlines()) == 2 * len(turns["full"]) + 1
