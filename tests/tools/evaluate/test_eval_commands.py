"""`coattn eval perplexity` and `fidelity` on a small random model: keys, windows, refusals."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.run import coattn
from tests.tools.evaluate.tiny import model_and_text
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOWS = ["--prefill", "60", "--decode", "4", "--stride", "100", "--length", "300"]
SOURCE = {"model", "dtype", "text", "versions", "hardware", "command", "commit", "starts", "prefill", "length"}
METHOD = {"row", "method", "params", "exact", "gpu_kv_peak", "host_kv_peak"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_and_text(tmp_path_factory.mktemp("model"))


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    where = ["--model", str(folder), "--text", str(folder / "text.txt")]
    done = coattn("eval", *arguments, *where, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_perplexity_equals_plain_transformers(folder: Path) -> None:
    result = run(folder, "perplexity", "--method", "full", "--length", "256", "--dtype", "float32")
    ids = AutoTokenizer.from_pretrained(folder)((folder / "text.txt").read_text(), return_tensors="pt").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(ids[:, :256]).logits[0, :-1]
    assert result["tokens"] == 255
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:256]).item()
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("arguments", [["full"], ["full", "--set", "block=4"], ["oracle", "--set", "budget=64"]])
def test_what_attends_to_everything_is_faithful_to_the_bit(folder: Path, arguments: list[str]) -> None:
    found = run(folder, "fidelity", "--method", *arguments, *WINDOWS)
    assert (found["kl"], found["kl_max"], found["top1"], found["top5"]) == (0.0, 0.0, 1.0, 1.0)
    assert (found["mass"], found["share_attended"], found["cpu_ratio"], found["steps"]) == (1.0, 1.0, 0.0, 12)
    assert found["cosine"] == pytest.approx(1.0, abs=1e-12)


def test_fidelity_writes_what_scripts_rely_on(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x" / "fidelity.json"
    found = run(folder, "fidelity", "--method", "cpu", "--set", "block=8", *WINDOWS, "--out", str(target))
    assert set(found) >= SOURCE | METHOD
    assert found["starts"] == [0, 100, 200]
    assert [window["start"] for window in found["windows"]] == found["starts"]
    assert found["kl"] < 1e-6
    assert 0.8 < found["cpu_ratio"] < 1.0
    layers = found["layers"]
    assert set(layers) == {"cosine", "mass", "share_attended", "cpu_ratio"}
    assert len({len(values) for values in layers.values()}) == 1
    assert found["cpu_ratio"] == pytest.approx(sum(layers["cpu_ratio"]) / len(layers["cpu_ratio"]))
    assert found["kl"] == pytest.approx(sum(w["kl"] for w in found["windows"]) / 3)
    assert json.loads(target.read_text())["kl"] == found["kl"]


def test_fidelity_says_bytes_and_an_interval_and_where_the_budget_covers_all(folder: Path) -> None:
    where = ["--model", str(folder), "--text", str(folder / "text.txt"), *WINDOWS]
    dense = "The budget covers the whole text: this is dense attention."
    for budget, covers in (("recent=8", False), ("recent=400", True)):
        said = coattn("eval", "fidelity", "--method", "streaming", "--set", budget, *where).stdout
        assert (dense in said) is covers
        assert re.search(r"streaming \(lossy\): KL \S+ \(95%: \S+ to \S+, worst", said)
        assert re.search(r"KV at most [\d.]+ \w+ in GPU memory, 0 B in DRAM", said)
    assert dense not in coattn("eval", "fidelity", "--method", "cpu", *where).stdout


def test_quick_is_two_windows_unless_told_otherwise(folder: Path) -> None:
    found = run(folder, "fidelity", "--quick", "--prefill", "60", "--stride", "100", "--length", "200")
    assert (found["starts"], found["steps"]) == ([0, 100], 64)
    done = coattn("eval", "fidelity", "--quick", "--length", "200", "--model", str(folder))
    assert done.returncode == 2
    assert "--quick and --length both set" in done.stderr


def test_perplexity_over_windows(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "perplexity.json"
    lossy = run(folder, "perplexity", "--method", "random", "--set", "budget=3", *WINDOWS, "--out", str(target))
    assert set(lossy) >= SOURCE | METHOD
    assert lossy["tokens"] == 3 * 63
    assert lossy["decode"]["tokens"] == 3 * 3
    assert lossy["ratio"] == pytest.approx(lossy["perplexity"] / lossy["perplexity_full"])
    for values in (lossy, lossy["decode"]):
        assert values["ratio_95"][0] < values["ratio"] < values["ratio_95"][1]
    full = run(folder, "perplexity", *WINDOWS)
    assert full["perplexity"] == pytest.approx(lossy["perplexity_full"])
    assert (full["ratio"], full["ratio_95"]) == (1.0, [1.0, 1.0])


def test_a_start_moves_the_windows(folder: Path) -> None:
    first = run(folder, "perplexity", "--prefill", "90", "--decode", "8")
    later = run(folder, "perplexity", "--prefill", "30", "--decode", "8", "--start", "60")
    assert first["starts"] == [0]
    assert later["starts"] == [60]
    assert first["decode"]["tokens"] == later["decode"]["tokens"] == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fidelity", "--prefill", "600"], "has only 512 positions"),
        (["perplexity", "--stride", "100", "--length", "200"], "--stride needs --prefill"),
        (["fidelity", "--method", "oracle", "--set", "budget=0"], "budget is 0"),
        (["fidelity", "--prefill", "60", "--decode", "4", "--gpu-kv", "1KiB"], "needs at least"),
    ],
)
def test_refusals(folder: Path, arguments: list[str], words: str) -> None:
    done = coattn("eval", *arguments, "--model", str(folder))
    assert done.returncode == 2
    assert words in done.stderr
