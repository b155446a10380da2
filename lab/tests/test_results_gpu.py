"""lab/scripts/results_gpu.py on a small model: every stage to its end, cut off and gone on with, and the page of it."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab.tests.evaluate.tasks.small_prompts import loaded

from coattn_lab.evaluate.results import read_result

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
WORDS = "the cat sat on a mat and then the dog ran after it over hill and dale. "


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = script("results_gpu")
    monkeypatch.setattr(module, "load_to_compare", lambda _: loaded())
    return module


def call(module: Any, tmp_path: Path, *more: str) -> int:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} {WORDS}" for i in range(60)))
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    lines = [
        {"prompt": f"{WORDS * (2 + 3 * (i % 2))}\n\nQuestion: what {i}?\nAnswer:", "gold": {"answers": ["cat"]}}
        for i in range(3)
    ]
    (data / "triviaqa.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    given = [
        "small", str(tmp_path / "out"), "--data", str(data), "--texts", str(text), "--length", "350,500",
        "--steps", "17", "--pack", str(tmp_path / "out.tgz"), *more,
    ]  # fmt: skip
    return CliRunner().invoke(module.main, given, catch_exceptions=False).exit_code


@pytest.mark.slow
def test_stages_run_to_their_end_and_their_page_is_made(stages: Any, tmp_path: Path) -> None:
    rows = "full,auto,streaming,quest"
    assert call(stages, tmp_path, "--rows", rows, "--stages", "eighth,quarter,mini,mini_rest") == 0
    table = read_result(tmp_path / "out" / "texts.json")
    found = {(line["asked"], line["budget"]): line for line in table["lines"]}
    assert {("auto", 0.125), ("auto", 0.25), ("streaming", 0.25), ("full", None)} <= set(found)
    exact, lossy = found["full", None], found["streaming", 0.125]
    assert exact["text"]["score"] == 100
    assert exact["answer_kl"]["kl"] < 1e-4 < lossy["answer_kl"]["kl"]
    assert exact["answer_kl"]["steps"] == 17
    assert set(exact["answer_kl"]["by_prompt"]) == {"text/text.txt/500/0", "text/text.txt/500/1"}
    assert exact["read_share"] == 1
    assert 0 < found["auto", 0.125]["dram_tokens"] < 500
    assert all(line["ms_per_step"] > 0 and line["gpu_kv_bytes"] > 0 for line in table["lines"])
    mini = read_result(tmp_path / "out" / "mini.json")["overall"]
    assert [(each["row"], each["budget"], each["items"]) for each in mini] == [
        ("full", None, 3), ("auto", None, 3), ("auto", 0.125, 3),
    ]  # fmt: skip
    with tarfile.open(tmp_path / "out.tgz") as archive:
        assert "out/texts.json" in archive.getnames()
    make = script("make_results")
    kept = {**table, "faults": [], "commit": "a" * 40, "hardware": {"gpu": "NVIDIA H200"}}
    page = make.shares_page(kept, {"overall": mini, "faults": []})
    assert sum(line.startswith("| `") for line in page.splitlines()) == len(table["lines"]) + 3
    assert f"{lossy['answer_kl']['kl']:.2g}" in page
    svg = make.picture(table["lines"])
    assert all(f">{name}</text>" in svg for name in ("auto", "streaming", "full,gpu_dtype=int8", "full,gpu_dtype=int4"))
    assert svg.count("<circle") == len(table["lines"]) - 1
    with pytest.raises(Exception, match="may not be published"):
        make.shares_page({**kept, "faults": ["full.json: it is not finished"]}, None)


@pytest.mark.slow
def test_a_run_whose_time_is_over_goes_on_where_it_was(stages: Any, tmp_path: Path) -> None:
    given = "--rows", "full,streaming", "--stages", "eighth"
    assert call(stages, tmp_path, *given, "--minutes", "0.000001") == 3
    first = {path.name: path.read_bytes() for path in (tmp_path / "out" / "texts").rglob("*.json")}
    assert set(first) == {"full.json"}
    assert call(stages, tmp_path, *given) == 0
    again = {path.name: path.read_bytes() for path in (tmp_path / "out" / "texts").rglob("*.json")}
    assert again["full.json"] == first["full.json"]
    assert len(again) == 4


def test_texts_are_not_answered_and_need_steps(stages: Any, tmp_path: Path) -> None:
    from coattn.errors import ConfigError
    from coattn.text import Text
    from coattn_lab.evaluate.tasks import run, text_make
    from coattn_lab.evaluate.tasks.prompts import PromptFile

    model = loaded()
    made = text_make.make(model.tokenizer, [Text("a", WORDS * 40)], [400], 2)
    assert [len(run.plan(model, PromptFile(tuple(made), {}, ""), kl=4).asks[i].ids) for i in range(2)] == [399, 399]
    for steps in (0, 135):
        with pytest.raises(ConfigError, match="--kl"):
            run.plan(model, PromptFile(tuple(made), {}, ""), kl=steps)
    with pytest.raises(Exception, match="are wanted"):
        text_make.make(model.tokenizer, [Text("a", WORDS)], [400], 2)
