"""LongBench: files of its format, prompts as published, truncation in the middle, and the command."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from lab.tests.run import coattn_lab
from tests.engine.small import tokenizer
from tests.tools.evaluate.tiny import save_model, save_rows

from coattn.errors import InputError
from coattn_lab.evaluate import longbench
from coattn_lab.evaluate.bench_item import encode, middle_out, summarise
from coattn_lab.evaluate.data import find_folder
from coattn_lab.evaluate.longbench_tasks import tasks


def row(**other: Any) -> dict[str, Any]:
    """A row as the public files have it."""
    plain = {
        "input": "Who sang?",
        "context": "A crow sang. {input} is no placeholder here.",
        "answers": ["the crow", "crow"],
        "length": 9,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    }
    return {**plain, **other}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_rows(tmp_path / "hotpotqa.jsonl", [row(), row(_id="a2", answers=["fox"])])
    save_rows(tmp_path / "trec.jsonl", [row(answers=["Food"], all_classes=["Food", "City"])])
    save_rows(tmp_path / "lcc_e.jsonl", [row(input="", context="x = 1\n", answers=["y = 2"])])
    return tmp_path


def test_all_datasets_are_there_with_both_places_filled() -> None:
    assert len(tasks()) == 21
    for name, task in tasks().items():
        assert task.prompt.count("{context}") == 1, name
        summaries_and_code = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        assert task.prompt.count("{input}") == (0 if name in summaries_and_code else 1), name


def test_a_prompt_is_as_published(folder: Path) -> None:
    item = longbench.items(longbench.read_tables(folder, ["hotpotqa"])[0])[0]
    rule = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    assert item.prompt == (
        f"{rule}\n\nThe following are given passages.\nA crow sang. {{input}} is no placeholder here.\n\n"
        f"{rule}\n\nQuestion: Who sang?\nAnswer:"
    )
    assert item.new_tokens == 32


def test_the_best_of_several_answers_counts(folder: Path) -> None:
    first, second = longbench.items(longbench.read_tables(folder, ["hotpotqa"])[0])
    assert first.score("crow!") == 1
    assert second.score("crow!") == 0


def test_few_shot_answers_are_judged_by_their_first_line(folder: Path) -> None:
    item = longbench.items(longbench.read_tables(folder, ["trec"])[0])[0]
    assert item.score("\nFood\nQuestion: next\nType: City") == 1


def test_few_shot_and_code_go_without_the_chat_template(folder: Path) -> None:
    for table in longbench.read_tables(folder):
        item = longbench.items(table)[0]
        text = tokenizer().decode(encode(item, tokenizer(), 10_000))
        assert text.startswith("user: ") is (table.name == "hotpotqa")
        assert {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"} == {
            n for n, t in tasks().items() if not t.chat
        }


def test_the_middle_is_cut_out() -> None:
    # LongBench pred.py: the first and the last half of the allowed tokens
    assert middle_out(list(range(10)), 4) == ([0, 1], [8, 9])
    assert middle_out(list(range(10)), 5) == ([0, 1], [8, 9])
    assert middle_out([1, 2], 2) == ([1, 2], [])


def test_truncation_happens_before_the_template(folder: Path) -> None:
    item = longbench.items(longbench.read_tables(folder, ["hotpotqa"])[0])[0]
    text = tokenizer().decode(encode(item, tokenizer(), 40))
    assert text == f"user: {item.prompt[:20]}{item.prompt[-20:]}\n"


@pytest.mark.parametrize(
    ("positions", "most"), [(4096, 3500), (8192, 7500), (16384, 15500), (32768, 31500), (512, 256)]
)
def test_prompts_are_as_long_as_published(positions: int, most: int) -> None:
    assert longbench.longest_prompt(positions) == most


def test_the_mean_counts_every_dataset_the_same() -> None:
    parts = [
        {"task": "a", "score": 1.0},
        {"task": "a", "score": 0.0},
        {"task": "a", "score": 0.5},
        {"task": "b", "score": 1.0},
    ]
    assert summarise(parts) == {
        "mean": 75.0,
        "tasks": [{"task": "a", "score": 50.0, "items": 3}, {"task": "b", "score": 100.0, "items": 1}],
    }


def test_an_archive_as_the_hub_has_it_is_unpacked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("zipped")
    with zipfile.ZipFile(target / "data.zip", "w") as archive:
        archive.write(folder / "trec.jsonl", "data/trec.jsonl")
    assert [table.name for table in longbench.read_tables(target)] == ["trec"]


def test_a_hub_name_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def give(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append((name, local_files_only))
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    assert find_folder("THUDM/LongBench") == folder
    assert asked == [("THUDM/LongBench", False)]


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(InputError, match="the hub does not give"):
        find_folder("nobody/nothing")


@pytest.mark.parametrize(
    ("lines", "sentence"), [("{", "line 1, is not JSON"), ('{"input": ""}', "lacks answers, context"), ("[]", "lacks")]
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, lines: str, sentence: str) -> None:
    (tmp_path / "qasper.jsonl").write_text(lines)
    with pytest.raises(InputError, match=sentence):
        longbench.read_tables(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def command(model: str, folder: Path, *more: str) -> Any:
    return coattn_lab("eval", "longbench", "--model", model, "--data", str(folder), *more)


def test_the_command_scores_each_dataset_and_the_mean(model: str, folder: Path, tmp_path: Path) -> None:
    done = command(model, folder, "--tasks", "hotpotqa,trec", "--json", "--out", str(tmp_path / "out" / "l.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(task["task"], task["items"]) for task in found["tasks"]] == [("hotpotqa", 2), ("trec", 1)]
    assert found["mean"] == pytest.approx(sum(task["score"] for task in found["tasks"]) / 2, abs=0.01)
    assert len(found["data"]["sha256"]) == 64
    assert json.loads((tmp_path / "out" / "l.json").read_text()) == found


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--tasks", "nonsense"], "no dataset 'nonsense'"),
        (["--tasks", "qasper"], "no file qasper.jsonl"),
        (["--max-length", "500"], "positions"),
    ],
)
def test_bad_input_gets_one_sentence(model: str, folder: Path, more: list[str], sentence: str) -> None:
    if "--max-length" in more:
        save_rows(folder / "qmsum.jsonl", [row(context="word " * 200)])
    done = command(model, folder, *more)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("hint: ")


def test_no_folder_and_no_files(model: str, tmp_path: Path) -> None:
    assert "no folder" in command(model, tmp_path / "nowhere").stderr
    assert "no LongBench files" in command(model, tmp_path).stderr
