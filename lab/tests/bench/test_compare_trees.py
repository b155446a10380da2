"""Two trees that are timed in turns: one that cannot run ends the other's waiting."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_trees.py"


def test_a_tree_that_cannot_start_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "result0.json").write_text("{}")  # of a run before
    broken = tmp_path / "tree" / "lab" / "coattn_lab"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('this tree is broken')\n")
    tree = str(tmp_path / "tree")
    command = [sys.executable, str(SCRIPT), tree, tree, str(tmp_path), "--turns", "2", "--", "--batch", "1"]
    done = subprocess.run(command, env={"PYTHONPATH": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"No row came of {tree}; see {tmp_path / 'log0'}.\n")
    assert "this tree is broken" in (tmp_path / "log0").read_text()
    with pytest.raises(TimeoutError, match="the other tree"):
        runpy.run_path(str(SCRIPT))["Turns"](tmp_path, 1, time.time() + 60).wait()
