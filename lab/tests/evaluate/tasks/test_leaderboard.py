"""`coattn-lab eval table` that runs rows: one command from a model to a table; what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import made
from tests.tools.evaluate.tiny import save_model

from coattn import provenance
from coattn_lab.cli import eval_table
from coattn_lab.cli.groups import lab
from coattn_lab.evaluate.tasks import run as tasks
from coattn_lab.evaluate.tasks.prompts import write_prompts


def table(*words: str) -> None:
    lab.main(["eval", "table", *words], prog_name="coattn-lab", standalone_mode=False)


def asked(tmp_path: Path, *rows: str, batch: int) -> list[str]:
    model = save_model(tmp_path / "model")
    write_prompts(tmp_path / "p.jsonl.gz", [*made(3, length=400), *made(1)], {"command": "x"})
    return [
        "--model", model, "--device", "cpu", "--prompts", str(tmp_path / "p.jsonl.gz"), "--modes", "fed",
        "--batch", str(batch), "--kl", "6", "--out", str(tmp_path / "t.json"), "--rows", ",".join(rows),
    ]  # fmt: skip


def test_quality_and_milliseconds_of_a_row_are_of_the_same_steps_at_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = asked(tmp_path, "streaming,recent=64|128", batch=2)
    monkeypatch.setattr(provenance, "arguments", ["coattn-lab", "eval", "table", *words])
    table(*words)
    found = json.loads((tmp_path / "t.json").read_text())
    for line in found["lines"]:
        kl = line["answer_kl"]
        assert kl["prompts"] == line["batch"] == min(2, line["ruler"]["items"])  # batches are filled with more prompts
        assert (line["ms_per_step"], line["timed_steps"]) == (kl["timed"]["ms"], kl["timed"]["steps"])
        assert kl["steps"] - 1 <= line["timed_steps"]
        assert 0 < line["ms_per_step"] <= line["p99_ms"]
    each = {row["row"]: row for row in found["overall"]}
    assert set(each) == {"full", "streaming,recent=64", "streaming,recent=128"}
    assert {row["items"] for row in each.values()} == {4}
    assert each["streaming,recent=64"]["lengths"] == [200, 400]
    assert each["streaming,recent=64"]["paired"] == 4


def test_a_stage_ends_between_rows_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = asked(tmp_path, "streaming,recent=64|128", batch=4)
    monkeypatch.setattr(provenance, "arguments", ["coattn-lab", "eval", "table", *words])
    stages = 0
    while (
        lab.main(["eval", "table", *words, "--minutes", "1e-9"], prog_name="coattn-lab", standalone_mode=False)
        == eval_table.UNFINISHED
    ):
        stages += 1
        assert "run the same command again" in capsys.readouterr().err
        assert len(list((tmp_path / "t").glob("*/*.json"))) <= 6
        assert stages < 6
    assert stages == 5  # three rows at two lengths, one in each stage
    done = [json.loads(path.read_text()) for path in (tmp_path / "t").glob("*/*.json")]
    assert [each["complete"] for each in done] == [True] * 6
    assert not any(each.get("resumed") for each in done)


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
