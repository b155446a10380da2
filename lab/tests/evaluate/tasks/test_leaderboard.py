"""`coattn-lab eval table` that runs rows: one command from a model to a table; what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import made
from tests.tools.evaluate.tiny import save_model

from coattn import provenance
from coattn.cli.main import cli
from coattn.errors import ConfigError
from coattn_lab.evaluate.tasks import run as tasks
from coattn_lab.evaluate.tasks.prompts import write_prompts


def table(*words: str) -> None:
    cli.main(["eval", "table", *words], prog_name="coattn", standalone_mode=False)


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
    monkeypatch.setattr(provenance, "arguments", ["eval", "table", *words])  # results name their command
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
    assert target.with_suffix(".png").stat().st_size > 5000
    assert sorted(path.name for path in (tmp_path / "t" / "400").iterdir())[0] == "full.json"
    capsys.readouterr()

    def none(*_: Any, **__: Any) -> None:
        raise AssertionError("everything is done")

    monkeypatch.setattr(tasks, "run_row", none)
    table(*words)
    assert json.loads(target.read_text())["lines"] == found["lines"]


def test_files_of_prompts_one_after_the_other_each_with_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = save_model(tmp_path / "model"), tmp_path / "t.json"
    write_prompts(tmp_path / "a.jsonl.gz", made(2, length=400), {"command": "x"})
    write_prompts(tmp_path / "b.jsonl.gz", made(2), {"command": "x"})
    words = (
        "--model", model, "--device", "cpu", "--prompts", str(tmp_path / "a.jsonl.gz"), "--modes", "fed",
        "--prompts", str(tmp_path / "b.jsonl.gz"), "--limit", "2,1", "--kl", "0", "--rows", "full",
        "--out", str(target),
    )  # fmt: skip
    monkeypatch.setattr(provenance, "arguments", ["eval", "table", *words])
    table(*words)
    found = {line["length"]: line["ruler"]["items"] for line in json.loads(target.read_text())["lines"]}
    assert found == {400: 2, 200: 1}
    with pytest.raises(ConfigError, match="--limit has 3 numbers for 2 files"):
        table(*words[:11], "1,2,3", *words[12:])


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for words, said in (
        ((), "nothing to make a table of"),
        (("--rows", "full"), "--out is missing"),
        (("--budget", "x%", "--out", str(tmp_path / "t.json")), "--budget has 'x%'"),
        (("--rows", "full,beta=1", "--out", str(tmp_path / "t.json")), "no parameter 'beta'"),
    ):
        with pytest.raises(ConfigError, match=said):
            table(*words)
    assert not (tmp_path / "t").exists()
