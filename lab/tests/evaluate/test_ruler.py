"""RULER: files of its format, answer lengths, string match, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.tests.run import coattn_lab
from tests.engine.small import tokenizer
from tests.tools.evaluate.tiny import save_model, save_rows

from coattn.errors import InputError
from coattn_lab.evaluate import ruler
from coattn_lab.evaluate.bench_item import encode

NIAH = {"index": 0, "input": "A magic number is 17. What is it?", "outputs": ["17", "23"], "length": 40}
QA = {"index": 3, "input": "Who sang?", "outputs": ["crow", "the crow"], "length": 20, "answer_prefix": " Answer:"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_rows(tmp_path / "4096" / "niah_multivalue" / "validation.jsonl", [NIAH, {**NIAH, "index": 1}])
    save_rows(tmp_path / "4096" / "qa_1" / "validation.jsonl", [QA])
    save_rows(tmp_path / "8192" / "data" / "vt" / "validation.jsonl", [NIAH])
    save_rows(tmp_path / "other.jsonl", [{"x": 1}])
    return tmp_path


def test_tasks_are_found_in_folders_of_lengths(folder: Path) -> None:
    assert [table.name for table in ruler.read_tables(folder)] == ["4096/niah_multivalue", "4096/qa_1", "8192/vt"]
    assert [table.name for table in ruler.read_tables(folder, ["vt"])] == ["8192/vt"]


def test_tasks_are_found_as_plain_files(tmp_path: Path) -> None:
    save_rows(tmp_path / "niah_single_1.jsonl", [NIAH])
    assert [table.name for table in ruler.read_tables(tmp_path)] == ["niah_single_1"]


def test_answers_are_as_long_as_published(folder: Path) -> None:
    # RULER constants.py: tokens_to_generate of niah, qa and variable_tracking
    assert [ruler.items(table)[0].new_tokens for table in ruler.read_tables(folder)] == [128, 32, 30]


def test_needles_want_all_values_and_questions_any(folder: Path) -> None:
    niah, qa, _ = (ruler.items(table)[0] for table in ruler.read_tables(folder))
    assert niah.score("17 and 5") == 1 / 2
    assert qa.score("A CROW\x07 it was") == 1


def test_unprintable_characters_end_a_word() -> None:
    # RULER postprocess_pred: every character below a space becomes a line break
    assert ruler.score("niah", ["1\n7"], "1\x007") == 1


def test_the_answer_begins_behind_the_template(folder: Path) -> None:
    qa = ruler.items(ruler.read_tables(folder, ["qa_1"])[0])[0]
    assert tokenizer().decode(encode(qa, tokenizer(), 1000)) == "user: Who sang?\n Answer:"
    raw = ruler.items(ruler.read_tables(folder, ["qa_1"])[0], chat=False)[0]
    assert tokenizer().decode(encode(raw, tokenizer(), 1000)) == "Who sang? Answer:"


def test_what_is_not_ruler_is_refused(tmp_path: Path) -> None:
    save_rows(tmp_path / "other.jsonl", [{"x": 1}])
    with pytest.raises(InputError, match="no RULER files"):
        ruler.read_tables(tmp_path)
    save_rows(tmp_path / "niah_1.jsonl", [{"input": "x"}])
    with pytest.raises(InputError, match="lacks outputs"):
        ruler.read_tables(tmp_path)
    with pytest.raises(InputError, match="no file for cwe"):
        ruler.read_tables(tmp_path, ["cwe"])


def test_the_command(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = save_model(tmp_path_factory.mktemp("model"))
    done = coattn_lab("eval", "ruler", "--model", model, "--data", str(folder), "--limit", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [task["task"] for task in found["tasks"]] == ["4096/niah_multivalue", "4096/qa_1", "8192/vt"]
    assert all(task["items"] == 1 for task in found["tasks"])
    assert found["evaluation"] == "ruler"
    assert "mean" in coattn_lab("eval", "ruler", "--model", model, "--data", str(folder), "--tasks", "vt").stdout
