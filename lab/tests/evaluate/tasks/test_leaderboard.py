"""`coattn-lab eval table` that runs rows: one command from a model to a table; what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import made
from tests.tools.evaluate.tiny import save_model

from coattn import provenance
from coattn_lab.cli.groups import lab
from coattn_lab.evaluate.tasks import run as tasks
from coattn_lab.evaluate.tasks.prompts import write_prompts


def table(*words: str) -> None:
    lab.main(["eval", "table", *words], prog_name="coattn-lab", standalone_mode=False)


def test_one_command_makes_the_table_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, target = save_model(tmp_path / "model"), tmp_path / "t.json"
    write_prompts(tmp_path / "p.jsonl.gz", [*made(2, length=400), *made(1)], {"command": "x"})
    words = (
        "--model", model, "--device", "cpu", "--prompts", str(tmp_path / "p.jsonl.gz"), "--budget", "40%",
        "--modes", "fed", "--limit", "1", "--batch", "1", "--kl", "2", "--length", "400", "--out", str(target),
        "--rows", "streaming,block=4,sinks=4,quest,block=4,budget=64",
    )  # fmt: skip
    monkeypatch.setattr(provenance, "arguments", ["coattn-lab", "eval", "table", *words])  # results name their command
    table(*words)
    found = json.loads(target.read_text())
    lines = {line["row"].split(",")[0]: line for line in found["lines"]}
    assert set(lines) == {"full", "streaming", "quest"}  # full is always there: the others stand beside it
    assert abs(lines["streaming"]["gpu_share"] / 0.4 - 1) <= 0.1
    assert (lines["streaming"]["budget"], lines["streaming"]["budget_missed"]) == (0.4, None)
    assert "keeps every token" in lines["quest"]["budget_missed"]
    assert lines["streaming"]["answer_kl"]["steps"] == 2
    assert lines["streaming"]["ruler"]["difference"] is not None
    page = target.with_suffix(".md").read_text()
    assert "of 40%)" in page
    assert "Not at their budget:" in page
    assert sorted(path.name for path in (tmp_path / "t" / "400").iterdir())[0] == "full.json"
    capsys.readouterr()

    def none(*_: Any, **__: Any) -> None:
        raise AssertionError("everything is done")

    monkeypatch.setattr(tasks, "run_row", none)
    table(*words)
    assert json.loads(target.read_text())["lines"] == found["lines"]
