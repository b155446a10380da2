"""Result files go on where they were cut off; folders of them become pages; the README is as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.run import coattn_lab
from tests.tools.evaluate.tiny import save_model

from coattn.errors import CoattnError, InputError
from coattn.tools.evaluate import asking
from coattn_lab.evaluate.report import BEGIN, END, fill, page, read_folder
from coattn_lab.evaluate.results import Results

ROOT = Path(__file__).resolve().parents[2]


def total(parts: Any) -> dict[str, int]:
    return {"total": len(parts)}


def results(path: Path | None, **config: Any) -> Results:
    return Results(path, {"evaluation": "needle", **config}, total, items="cells", key="cell")


def test_a_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = results(path, seed=1)
    first.add({"cell": "a", "found": True})
    assert json.loads(path.read_text())["complete"] is False
    second = results(path, seed=1)
    assert set(second.done) == {"a"}
    second.add({"cell": "b", "found": False})
    found = second.finish(["b", "a"])
    assert [part["cell"] for part in found["cells"]] == ["b", "a"]
    assert (found["total"], found["complete"], len(found["resumed"])) == (2, True, 1)
    assert json.loads(path.read_text()) == found


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = results(path)
    first.add({"cell": "a"})
    first.finish(["a"])
    before = path.read_bytes()
    assert results(path).finish(["a"]) == json.loads(before)
    assert path.read_bytes() == before


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results(path, seed=1, method="full").add({"cell": "a"})
    with pytest.raises(InputError, match='another method: "full", not "streaming"'):
        results(path, seed=1, method="streaming")


def test_a_file_that_is_no_result_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.touch()
    assert results(path).done == {}
    path.write_text("notes")
    with pytest.raises(InputError, match="not a result file"):
        results(path)


class StopError(CoattnError):
    """Raised in the middle of a run."""


def test_a_command_that_was_cut_off_does_not_run_finished_cells_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    command = ["eval", "needle", "--model", model, "--lengths", "300", "--depths", "3", "--batch", "1"]
    command += ["--out", str(tmp_path / "n.json"), "--json"]
    whole, asked = asking.answers, []

    def cut(llm: Any, asks: Any, *more: Any) -> Any:
        asked.append(len(asks))
        for i, pair in enumerate(whole(llm, asks, *more)):
            if i == 2:
                raise StopError("Stopped.", "Go on.")
            yield pair

    monkeypatch.setattr(asking, "answers", cut)
    assert coattn_lab(*command).returncode == 2
    assert coattn_lab(*command).returncode == 0
    assert asked == [3, 1]
    found = json.loads((tmp_path / "n.json").read_text())
    assert (len(found["cells"]), found["complete"]) == (3, True)
    other = coattn_lab(*command, "--seed", "7")
    assert (other.returncode, "another seed" in other.stderr) == (2, True)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHERE = {
    "command": "coattn x",
    "commit": COMMIT,
    "tree": "0123456789abcdef",
    "versions": {"torch": "2.13"},
    "hardware": {"cpu": "a CPU", "cores": 2, "gpu": None},
}
SUBJECT = {"model": "m", "dtype": "float32", "method": "streaming", "params": {"recent": 8}, "length": 64, **WHERE}
NEEDLE = {
    "evaluation": "needle", "found": 1, "total": 2, "keys": 1, "gpu_share": 0.125,
    "by_length": [{"length": 1024, "found": 1, "total": 2, "read_share": 0.1304}], "cells": [], **SUBJECT,
}  # fmt: skip
DECODE = {
    "method": "hgca", "shapes": "s", "batch": 1, "context": 8192, "params": {"window_blocks": 4, "kept": [0.07]},
    "settings": {"window_blocks": 4, "block": 32, "beta": 1}, "dtype": "bfloat16", "kept_share": 0.07,
    "simulated": ["random weights", "random keys and values", "assumed lists"], "ms_per_step": 4.0,
    "tokens_per_s": 250.0, "floor_ms": 2.0, "gpu_idle": 0.31, "idle_cpu": 0.3, "idle_pcie": 0.01, "idle_steps": 5,
    "gpu_kv_bytes": 1024, "host_kv_bytes": 2048, "gpu_budget": None,
}  # fmt: skip
SWEEP = {
    "row": "hgca,beta=4,alpha=0.1", "method": "hgca", "ratio": 1.01, "ratio_95": [1.0, 1.02], "kl": 0.003,
    "top1": 0.5, "attended_gpu": 100.0, "attended_host": 20.0, "kept_mean": 0.25,
    "params": {"block": 32, "window_blocks": 4, "beta": 4, "alpha": 0.1},
}  # fmt: skip
OPS = {
    "kernel": "attend", "isa": "amx", "dtype": "bf16", "group": 4, "head_size": 128, "threads": 2, "gbps": 30.0,
    "limit_gbps": 40.0, "tokens_per_s": 8.0, "torch_tokens_per_s": 4.0,
}  # fmt: skip
PREFILL = {
    "method": "offload", "tokens": 32768, "gpu_memory": 1 << 30, "seconds": 2.0, "tokens_per_s": 16384.0, "ratio": 1.1,
    "kl": 1e-9, "same_top": True, "gpu_kv_peak": 1 << 30, "host_kv_peak": 0,
}  # fmt: skip
REQUESTS = {
    "method": "scout", "params": {}, "requests": 24, "tokens": 1536, "total_s": 16.0, "tokens_per_s": 96.0,
    "ttft_median_s": 8.5, "between_p99_s": 0.04, "chunk": 8192,
}  # fmt: skip
BESIDE = {
    "method": "full", "batch": 8, "context": 16384, "tokens": 65536, "between_median_s": 0.011, "beside_p99_s": 0.033,
    "between_ratio": 3.0, "prompt_alone_s": 3.4, "prompt_beside_s": 4.42, "prompt_ratio": 1.3,
}  # fmt: skip
SCORES = {"mean": 42.0, "tasks": [{"task": "qasper", "score": 42.0, "items": 3}], "items": [], **SUBJECT}
FILES: dict[str, dict[str, Any]] = {
    "needle": NEEDLE,
    "fidelity": {"evaluation": "fidelity", "kl": 0.03, "top1": 0.5, "mass": 0.25, **SUBJECT},
    "perplexity": {
        "evaluation": "perplexity", "perplexity": 10.0, "perplexity_full": 9.0, "ratio": 1.1111, "tokens": 99,
        "decode": {"ratio": 1.2, "ratio_95": [1.1, 1.3]}, **SUBJECT,
    },
    "attention": {
        "evaluation": "attention", "locality": {"mass": 0.99, "entries_mean": 512.0, "share_mean": 0.25},
        "drift": {"mass": {"mean": 0.2}, "bound": {"mean": None}},
        "query_ahead": {"norm_rope": {"mean": 0.9}}, **SUBJECT,
    },
    "longbench": {"evaluation": "longbench", **SCORES},
    "ruler": {"evaluation": "ruler", **SCORES},
    "sweep": {
        "evaluation": "sweep", "rows": [SWEEP], "text": {"name": "a.txt"}, "starts": [0, 9], "prefill": 56, **SUBJECT,
    },
    "decode": {"rows": [DECODE], **WHERE},
    "ops": {"rows": [OPS], **WHERE},
    "prefill": {"rows": [PREFILL], "shapes": "s", **WHERE},
    "requests": {"rows": [REQUESTS], "shapes": "s", "gpu_kv": 12 << 30, **WHERE},
    "beside": {"rows": [BESIDE], "shapes": "s", **WHERE},
}  # fmt: skip
LINES = {
    "needle": "| m (float32) | `streaming`, recent 8, GPU 12.5% of the KV | pass key | 1 of 2 | 1,024: 1/2 (13%) |",
    "fidelity": "| 64 | 0.03 | 50.0% |  |  | 25.0% |  |  |",
    "perplexity": "| 10.000 | 9.000 | 1.1111 | 1.2000 (1.1000 to 1.3000) | 99 |",
    "attention": "| m (float32) | 64 | 512 (25.0%) for 99% | 20.0% by mass | 0.900, -, -, - |",
    "longbench": "| qasper | 3 | 42.00 |",
    "ruler": "| mean | 3 | 42.00 |",
    "sweep": "| `hgca`, window 128, beta 4, alpha 0.1 | 1.0100 (1.0000 to 1.0200) | 0.003 | 50.0% |",
    "decode": "| `hgca`, window 128, kept 7% | 1 | 4.00 | 2.00 | 2.00 | 250.0 | 31% (CPU 30%, PCIe 1%) |",
    "ops": "| attend | amx | bf16 | 4 | 128 | 2 | 30.0 | 40.0 | 75% | 2.00 |",
    "prefill": "| s | `offload` | 1.0 GiB | 32,768 | 2.00 | 16,384 | 1.10 |  |  | 1.0e-09 |",
    "requests": "| s | 12.0 GiB | `scout`, chunk=8192 | 24 | 1,536 | 16.00 | 96 | 8.50 s | 40 ms |",
    "beside": "| s | `full` | 8 of 16,384 | 11.0 ms | 33.0 ms | 3.00 | 65,536, 4.42 s | 3.40 s | 1.30 |",
}
CAPTIONS = {
    "sweep": "m (float32), 2 windows of 64 tokens of a.txt, the last 8 decoded; a CPU, 2 cores:",
    "decode": "s, 8,192 tokens, batch 1, DRAM as the model has it; a CPU, 2 cores:",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    for name in ("needle.png", "needle_more.png", "stranger.png"):
        (tmp_path / name).touch()
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"rows": []}')
    return tmp_path


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_has_its_row(folder: Path, kind: str) -> None:
    text = page(read_folder(folder), folder)
    assert LINES[kind] in text
    assert CAPTIONS.get(kind, "") in text
    assert f"- [{kind}.json]({kind}.json), `coattn x`, a CPU, 2 cores, torch 2.13, commit {COMMIT[:12]}\n" in text


def test_a_result_without_a_clean_commit_is_marked(folder: Path) -> None:
    for name, data in {"a": {"commit": None}, "b": {"commit": "abc1234-dirty"}, "c": {"unfinished": True}}.items():
        (folder / f"{name}.json").write_text(json.dumps({**NEEDLE, **data}))
    text = page(read_folder(folder), folder)
    assert "**not to be published: it names no commit**" in text
    assert "**not to be published: commit abc1234-dirty is not a clean one**" in text
    assert "**not to be published: it is not finished**" in text


def test_a_result_of_an_earlier_version_reads_the_same(folder: Path) -> None:
    text = page(read_folder(folder), folder)
    gone, decode = {"attended_gpu": "attended_near", "attended_host": "attended_far"}, FILES["decode"]["rows"][0]
    sweep = {gone.get(name, name): value for name, value in SWEEP.items()}
    (folder / "sweep.json").write_text(json.dumps({**FILES["sweep"], "rows": [sweep]}))
    settings = {**decode["settings"], "dram": "int8", "context": 0.1}
    (folder / "decode.json").write_text(json.dumps({"rows": [{**decode, "settings": settings}], **WHERE}))
    other = page(read_folder(folder), folder)
    assert other == text.replace("DRAM as the model has it", "DRAM in int8").replace(
        "`hgca`, window 128, kept 7%", "`hgca`, window 128, DRAM int8, kept 7%"
    )


def test_unlike_rows_of_speed_stand_in_tables_of_their_own(folder: Path) -> None:
    other = [
        {**DECODE, "settings": {**DECODE["settings"], "host_dtype": "int8"}},
        {**DECODE, "batch": 2},
        {**DECODE, "context": 4096},
        {**DECODE, "shapes": "t"},
        {**DECODE, "gpu_budget": 1 << 30},
        {**DECODE, "method": "full", "host_kv_bytes": 0},
    ]
    (folder / "more.json").write_text(json.dumps({"rows": other, **WHERE}))
    fits = {"rows": [DECODE, {**DECODE, "batch": 9}], "memory": {"gpu_memory": 48 << 30}, **WHERE}
    (folder / "fits.json").write_text(json.dumps(fits))
    lines = page(read_folder(folder), folder).splitlines()
    tables = [line for line in lines if line.endswith("a CPU, 2 cores:") and "tokens, " in line and line[0] in "st"]
    assert tables == [
        "s, 8,192 tokens, batch 1, DRAM as the model has it; a CPU, 2 cores:",
        "s, 8,192 tokens, 48.0 GiB of GPU memory, the largest batch that fits, DRAM as the model has it; a CPU, "
        "2 cores:",
        "s, 8,192 tokens, batch 1, DRAM in int8; a CPU, 2 cores:",
        "s, 8,192 tokens, batch 2, DRAM as the model has it; a CPU, 2 cores:",
        "s, 4,096 tokens, batch 1, DRAM as the model has it; a CPU, 2 cores:",
        "t, 8,192 tokens, batch 1, DRAM as the model has it; a CPU, 2 cores:",
        "s, 8,192 tokens, batch 1, at most 1.0 GiB of KV in GPU memory, DRAM as the model has it; a CPU, 2 cores:",
    ]


def test_figures_are_linked_and_strangers_are_named(folder: Path) -> None:
    done = coattn_lab("eval", "report", str(folder))
    text = (folder / "report.md").read_text()
    assert (done.returncode, done.stdout) == (0, "")
    assert [line for line in text.splitlines() if line.startswith("![")] == [
        "![needle](needle.png)",
        "![needle_more](needle_more.png)",
    ]
    assert "- list.json: not a JSON object" in text
    assert "- other.json: not a result that has a table" in text


def test_the_page_may_stand_elsewhere(folder: Path) -> None:
    assert coattn_lab("eval", "report", str(folder), "--out", str(folder / "pages" / "r.md")).returncode == 0
    assert "![needle](../needle.png)" in (folder / "pages" / "r.md").read_text()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "nowhere"):
        done = coattn_lab("eval", "report", str(name))
        assert done.returncode == 2
        assert "hint: " in done.stderr


@pytest.mark.parametrize("text", [BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_broken_markers_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="must hold"):
        fill(text, "x")
