"""One table of many folders: means and differences by hand, intervals that hold, nothing counted twice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from coattn.errors import InputError
from coattn_lab.evaluate.tasks import table
from coattn_lab.evaluate.tasks.summary import difference, interval, mean_of_tasks, summarise


def item(name: str, score: float, task: str = "vt", mode: str = "read", length: int = 100) -> dict[str, Any]:
    return {
        "item": f"{name}#{mode}", "benchmark": "ruler", "task": task, "length": length, "mode": mode,
        "score": score, "tokens": 9, "found_at": 4 if score == 1 else None, "answer": "",
    }  # fmt: skip


def save(path: Path, row: str, items: list[dict[str, Any]], **more: Any) -> None:
    run = {
        "gpu_kv_bytes": 1024, "host_kv_bytes": 0, "gpu_share": 0.25, "read_share": 0.5, "ms_per_step": 2.0, "batch": 4,
        "captured": False,
    }  # fmt: skip
    data = {
        "evaluation": "tasks", "model": "small", "model_sha256": "ab", "dtype": "float32", "named": row,
        "items": items, "runs": {"100": run}, "complete": True, "commit": "a" * 40, "tree": "b", **more,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def test_every_task_counts_the_same_and_differences_are_paired() -> None:
    own = [item("a", 1), item("b", 0), item("c", 0.5, "qa"), item("d", 1, "qa"), item("e", 0, "qa")]
    full = [item("a", 1), item("b", 1), item("c", 0.5, "qa"), item("d", 1, "qa")]
    line = summarise(own)["scores"][0]
    assert line["score"] == 50.0  # vt (1 + 0) / 2, qa (0.5 + 1 + 0) / 3: both 50
    assert line["tokens_to_answer"] == 4
    found = difference(own, full)
    assert found is not None
    assert (found[0], found[2]) == (-25.0, 4)  # vt loses b: -50; qa loses nothing on c and d; e has no partner
    assert difference(own, [item("x", 1)]) is None


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draws, held = random.Random(0), 0
    for i in range(200):
        tasks = {name: [float(draws.random() < 0.6) for _ in range(20)] for name in "abcd"}
        found = interval(tasks, draws=400, seed=i)
        assert found is not None
        held += found[0] <= 0.6 <= found[1]
        assert found[0] <= mean_of_tasks(tasks) <= found[1]
    assert 176 <= held <= 199  # 95% of 200 is 190
    assert interval({"a": [1.0], "b": [0.0]}) is None


def test_seeds_add_up_and_rows_stand_beside_full(tmp_path: Path) -> None:
    for seed in range(3):
        items = [item(f"{seed}/{i}", 1.0) for i in range(4)]
        save(tmp_path / str(seed) / "full.json", "full", items)
        save(
            tmp_path / str(seed) / "x.json", "quest", [{**each, "score": float(i > 0)} for i, each in enumerate(items)]
        )
    found = table.lines(table.read_results([tmp_path / str(seed) for seed in range(3)]))
    full, quest = found
    assert (full["row"], full["ruler"]["items"], full["ruler"]["difference"]) == ("full", 12, None)
    assert quest["ruler"]["score"] == 75
    assert quest["ruler"]["difference"] == -25
    low, high = quest["ruler"]["difference_95"]
    assert low < -25 < high <= 0
    assert (quest["gpu_share"], quest["read_share"], quest["ms_per_step"]) == (0.25, 0.5, 2.0)


def test_the_same_prompt_twice_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a" / "full.json", "full", [item("a", 1)])
    save(tmp_path / "b" / "full.json", "full", [item("a", 1)])
    with pytest.raises(InputError, match="answers a#read under full"):
        table.read_results([tmp_path])
    save(tmp_path / "b" / "full.json", "full", [item("b", 1)], model_sha256="cd")
    with pytest.raises(InputError, match="another model of the name small"):
        table.read_results([tmp_path])


def test_sweeps_add_their_kl_and_faults_are_named(tmp_path: Path) -> None:
    save(tmp_path / "full.json", "full", [item("a", 1)])
    save(tmp_path / "quest.json", "quest,budget=64", [item("a", 1)], commit="c-dirty")
    sweep = {
        "evaluation": "sweep", "model": "small", "dtype": "float32", "length": 300, "text": {"name": "t"},
        "rows": [{"row": "quest,budget=64", "kl": 0.125}, {"row": "other", "kl": 1.0}],
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    (tmp_path / "broken.json").write_text("{")
    rows = table.read_results([tmp_path])
    page = table.page(table.lines(rows), rows)
    assert "| 0.12 (300 tokens of t) |" in page
    assert "quest.json: commit c-dirty is not a clean one" in page
    assert "full.json" not in page
