"""Commands side by side: one that is alone is alone, and gets there although others never stop working."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import made
from tests.tools.evaluate.tiny import save_model

from coattn import provenance
from coattn.cli.main import cli
from coattn_lab.evaluate.tasks import running
from coattn_lab.evaluate.tasks.prompts import write_prompts
from coattn_lab.evaluate.tasks.turns import Turns, turns_of


def works(path: str, until: float, seen: Any) -> None:
    """Pieces of work of two milliseconds, one after the other; notes when each begins and ends."""
    turns = Turns(Path(path))
    while time.monotonic() < until:
        turns.work()
        begun = time.monotonic()
        time.sleep(0.002)
        seen.append((begun, time.monotonic()))
    turns.rest()


def test_nobody_works_while_one_is_alone(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with fork.Manager() as manager:
        seen, path, until = manager.list(), str(tmp_path / "lock"), time.monotonic() + 3
        others = [fork.Process(target=works, args=(path, until, seen)) for _ in range(3)]
        for other in others:
            other.start()
        alone = []
        with turns_of(path) as turns:
            for _ in range(5):
                turns.work()
                time.sleep(0.01)
                assert turns.alone(2.0)
                begun = time.monotonic()
                time.sleep(0.05)
                alone.append((begun, time.monotonic()))
            assert time.monotonic() < until, "it got there while the others worked"
        for other in others:
            other.join()
        assert len(seen) > 20
        for begun, ended in seen:
            assert all(ended <= start or begun >= end for start, end in alone)


def test_commands_side_by_side_make_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = save_model(tmp_path / "model"), tmp_path / "t.json"
    write_prompts(tmp_path / "p.jsonl.gz", made(2, length=400), {"command": "x"})
    monkeypatch.setattr(running, "TIMED", 3)
    for rows in ("full", "streaming,block=4,sinks=4", "transformers"):
        words = [
            "--model", model, "--device", "cpu", "--prompts", str(tmp_path / "p.jsonl.gz"), "--budget", "40%",
            "--batch", "1", "--kl", "2", "--out", str(target), "--rows", rows, "--turns", str(tmp_path / "lock"),
        ]  # fmt: skip
        monkeypatch.setattr(provenance, "arguments", ["eval", "table", *words])
        cli.main(["eval", "table", *words], prog_name="coattn", standalone_mode=False)
        assert not target.exists()
    cli.main(["eval", "table", str(tmp_path / "t"), "--out", str(target)], prog_name="coattn", standalone_mode=False)
    lines = {(line["row"].split(",")[0], line["mode"]): line for line in json.loads(target.read_text())["lines"]}
    assert set(lines) == {
        ("full", "fed"),
        ("full", "read"),
        ("streaming", "fed"),
        ("streaming", "read"),
        ("transformers", "read"),
    }
    assert all(line["ms_per_step"] for (row, _), line in lines.items() if row != "transformers")
    assert lines["transformers", "read"]["ruler"]["difference"] == 0
