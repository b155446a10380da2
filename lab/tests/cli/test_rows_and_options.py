"""Every command of the laboratory under every row, with options that fit it and options that do not: it runs (exit 0)
or is refused with one sentence and a hint (exit 2). Nothing else may happen."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lab.tests.run import coattn_lab
from tests.cli.folders import save_tiny

from coattn.hf.random_model import SHAPES
from coattn.method.table import METHODS
from coattn_lab.bench.limits import NONE
from tests.cli.test_rows_and_options import SLIDING, judge

REQUESTS = "bench requests --count 2 --prompts fixed:70 --new fixed:3 --device cpu --no-floor --max-batch 2"
DECODE = "bench decode --context 200 --steps 4 --seconds 0 --device cpu"
BENCHES = {
    "decode": f"{DECODE} --batch 2 --methods",
    "decode driven": f"{DECODE} --change 0.124 --fetched 3 --kept 0.1 --methods",
    "decode more rows": f"{DECODE} --resident --handover --peers --methods",
    "decode capped": f"{DECODE} --gpu-kv 9KiB --methods",
    "decode on two": "bench decode --context 200 --steps 4 --seconds 0 --devices cpu,cpu --methods",
    "decode few": f"{DECODE} --change 0.5 --set budget=32 --methods",
    "decode short": f"{DECODE} --context 1 --fetched 0 --kept 1 --methods",
    "requests": f"{REQUESTS} --methods",
    "requests driven": f"{REQUESTS} --change 0.124 --methods",
    "requests capped": f"{REQUESTS} --gpu-kv 9KiB --host-kv 9KiB --methods",
    "prefill": "bench prefill --tokens 90 --chunk 40,whole --device cpu --methods",
    "prefill capped": "bench prefill --tokens 90 --chunk 1 --gpu-kv 9KiB --device cpu --methods",
}
TEXT = "--text text.txt --length 120 --prefill 90 --decode 4"
FIGURES = [
    *(f"bench scout --figure {n} --budget 96 --batch 2 --context 200 --steps 4 --seconds 0 --device cpu --shapes"
      for n in ("2", "3", "8", "9", "10", "12", "lengths", "7")),
    "bench scout --budget 96 --batch 2 --context 200 --steps 4 --seconds 0 --device cpu --methods auto --shapes",
    "bench scout --budget 96 --batch 2 --context 64 --change 0 --steps 4 --seconds 0 --device cpu --shapes",
    *(f"bench hgca --figure {n} --batch 2 --context 200 --window 64 --steps 4 --seconds 0 --peers --device cpu --shapes"
      for n in ("6", "10", "11", "12", "13", "7")),
    "bench hgca --figure 11 --batch 1 --context 8 --kept 0 --window 64 --steps 4 --seconds 0 --device cpu --shapes",
    *(f"bench hcattention --table {name} --context 256 --tokens 128 --block 64 --steps 3 --device cpu --shapes"
      for name in ("kernels", "long", "prompt")),
    "bench prompt-kernels --contexts 64 --chunks 32,whole --device cpu --shapes",
]  # fmt: skip
MEASUREMENTS = [
    f"eval sweep {TEXT} --budget 25% --out sweep.json full scout auto hgca",
    f"eval attention {TEXT} --budget 64",
    f"eval attention {TEXT} --budget 4096 --block 7",
    f"eval audit {TEXT} --quality 0.9",
    f"eval audit {TEXT} --quality 0 --set window_blocks=1",
    "eval table --length 300 --text text.txt --limit 1 --kl 2 --raw --budget 50% --out table.json --rows full,auto,duo",
    "eval table --length 100 --text text.txt --raw --out table.json --rows full",
    "bench hcattention --table budgets --text text.txt --length 100 --decode 4",
    "bench hcattention --table 3 --text text.txt --length 100 --decode 4",
    "bench hcattention --table renormalise --text text.txt --length 100 --decode 4 --books .",
    "bench scout --figure 6 --text text.txt --prefill 90 --decode 4 --budget 96",
    "bench scout --figure table1 --text text.txt --prefill 90 --decode 4 --budget 96",
    "bench requests --count 2 --prompts fixed:70 --new fixed:3 --methods transformers,full --max-batch 2",
    "eval tasks make prompts.jsonl --benchmarks needle --lengths 100 --samples 1 --haystack text.txt",
    "eval longbench --data .",
    "eval ruler --data . --raw",
]


def assert_runs_or_is_refused(*arguments: str) -> None:
    judge(coattn_lab(*arguments))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return {name: save_tiny(name, tmp_path_factory.mktemp(name), template) for name in ("llama", "gemma3")}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder with a text, the small shapes, and rates of this machine that are not measured."""
    monkeypatch.setitem(SHAPES, "tiny-sliding", SLIDING)
    monkeypatch.setattr("coattn_lab.bench.limits.measure", lambda *_: {**NONE, "dram_gbps": 10.0})
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(f"w{i * i % 157}" for i in range(400)), encoding="utf-8")


PLAIN = ("full", "auto", "scout")
"""Rows that are also tried on models whose layers are all alike."""
BROKEN = {("auto", "decode driven"), ("offload", "requests driven"), ("scout", "requests driven")}
"""Always tried: they once ended in a traceback, or do what the others do not."""


def crossed(commands: Iterable[str], alike: str, sliding: str) -> list[Any]:
    """Every row with every command, on a kind of model. Quick is each command with one row; the others are slow."""
    found = []
    for (i, row), (j, command), kind in product(enumerate(METHODS), enumerate(commands), (alike, sliding)):
        if kind == sliding or row in PLAIN:
            quick = kind == sliding and ((i + j) % len(METHODS) == 0 or (row, command) in BROKEN)
            found.append(pytest.param(row, command, kind, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("row", "bench", "shapes"), crossed(BENCHES, "tiny", "tiny-sliding"))
def test_a_bench_under_a_row(row: str, bench: str, shapes: str) -> None:
    assert_runs_or_is_refused(*BENCHES[bench].split(), row, "--shapes", shapes)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["tiny", "tiny-sliding"])
@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure(figure: str, shapes: str) -> None:
    assert_runs_or_is_refused(*figure.split(), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_a_measurement(measurement: str, family: str, folders: dict[str, Path]) -> None:
    assert_runs_or_is_refused(*measurement.split(), "--model", str(folders[family]))
