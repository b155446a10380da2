"""Every command under every row of the table, with options that fit the row and options that do not: it runs (exit 0)
or is refused with one sentence and a hint (exit 2). Nothing else may happen."""

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.cli.folders import save_tiny
from tests.cli.run import Done, coattn

from coattn.method.table import METHODS
from coattn_lab.bench.random_model import SHAPES

SLIDING = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size": 256,
    "max_position_embeddings": 1 << 20,
}
"""As Gemma 3: layers of which most look back a few tokens only, and so have no index, no rule and nothing in DRAM."""

TEXT = "--text text.txt --length 120 --prefill 90 --decode 4"
ON_A_MODEL = {
    "generate": "generate w1 --raw --max-new-tokens 3 --fidelity --method",
    "generate long": "generate --file text.txt --raw --max-new-tokens 3 --gpu-kv 100KiB --method",
    "generate on two": "generate w1 --raw --max-new-tokens 2 --devices cpu,cpu --method",
    "bench decode": "bench decode --batch 2 --context 200 --steps 4 --methods",
    "bench decode capped": "bench decode --context 200 --steps 4 --gpu-kv 9KiB --methods",
    "bench prefill": "bench prefill --lengths 40,90 --methods",
    "bench requests": "bench requests --requests 3 --lengths 70,20 --new-tokens 3 --max-batch 2 --methods",
    "bench requests capped": "bench requests --requests 2 --lengths 70 --gpu-kv 9KiB --host-kv 9KiB --methods",
    "trace": "trace --context 200 --steps 1 --method",
    "chat": "chat --max-new-tokens 2 --max-length 64 --method",
    "perplexity": f"eval perplexity {TEXT} --method",
    "fidelity": f"eval fidelity {TEXT} --gpu-kv 24KiB --method",
    "needle": "eval needle --lengths 60,120 --depths 2 --text text.txt --gpu-share 1/4 --method",
}
MEASUREMENTS = [
    "calibrate duo --text text.txt --length 120 --samples 1 --sinks 4 --recent 8 --out heads.json",
    "calibrate duo --text text.txt --length 20 --samples 1 --out heads.json",
    "calibrate hcattention --text text.txt --length 120 --samples 1 --centroids 16 --groups 4 --out book.safetensors",
    "calibrate hcattention --text text.txt --length 4 --samples 1 --out book.safetensors",
    "calibrate infinigen --text text.txt --length 100 --out skew.safetensors",
    "calibrate infinigen --text text.txt --length 1 --out skew.safetensors",
    "demo --tokens 1500 --out demo",
    "plan --context 300",
    "doctor",
    "models",
    "sessions",
]


def assert_runs_or_is_refused(*arguments: str) -> None:
    judge(coattn(*arguments, stdin="w1 w2\n"))


def judge(done: Done) -> None:
    """It ran, or it was refused with one sentence and a hint."""
    if done.returncode == 0:
        return
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert [line.partition(":")[0] for line in said] == ["error", "hint"], done.stderr
    assert said[0].endswith("."), said[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return {name: save_tiny(name, tmp_path_factory.mktemp(name), template) for name in ("llama", "gemma3")}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with a text, and the small shapes."""
    monkeypatch.setitem(SHAPES, "tiny-sliding", SLIDING)
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(f"w{i * i % 157}" for i in range(400)), encoding="utf-8")


PLAIN = ("full", "auto", "scout")
"""Rows that are also tried on models whose layers are all alike."""


def crossed(commands: Iterable[str], alike: str, sliding: str) -> list[Any]:
    """Every row with every command, on a kind of model. Quick is each command with one row; the others are slow."""
    found = []
    for (i, row), (j, command), kind in product(enumerate(METHODS), enumerate(commands), (alike, sliding)):
        if kind == sliding or row in PLAIN:
            quick = kind == sliding and (i + j) % len(METHODS) == 0
            found.append(pytest.param(row, command, kind, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize("row", METHODS)
def test_a_plan_under_a_row(row: str) -> None:
    Path("config.json").write_text(json.dumps(SLIDING), encoding="utf-8")
    plan = ("plan", ".", "--context", "300", "--method", row)
    for more in (("--gpu", "1MiB", "--dram", "1KiB"), ("--gpu", "2x24", "--batch", "3"), ("--gpu", "no card")):
        assert_runs_or_is_refused(*plan, *more)


@pytest.mark.parametrize(("row", "command", "family"), crossed(ON_A_MODEL, "llama", "gemma3"))
def test_a_command_under_a_row(row: str, command: str, family: str, folders: dict[str, Path]) -> None:
    assert_runs_or_is_refused(*ON_A_MODEL[command].split(), row, "--model", str(folders[family]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_a_measurement(measurement: str, family: str, folders: dict[str, Path]) -> None:
    of = [] if measurement in ("doctor", "models", "sessions") else ["--model", str(folders[family])]
    assert_runs_or_is_refused(*measurement.split(), *(of[1:] if measurement.startswith("plan") else of))
