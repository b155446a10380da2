"""Every command of the laboratory runs on a tiny model: exit 0, one JSON object that names what made it."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from lab.tests.run import coattn_lab
from tests.cli.folders import save_tiny

from coattn_lab.bench.limits import NONE
from coattn_lab.cli.groups import lab

TEXT = "--text text.txt --length 120 --prefill 90 --decode 4"
STEPS = "--steps 4 --seconds 0 --device cpu --shapes tiny"
REQUESTS = "bench requests --shapes tiny --count 2 --prompts fixed:70 --new fixed:3 --device cpu --max-batch 2"
ALONE = [
    f"bench decode --methods full,cpu --context 200 --turns 2 --peers {STEPS}",
    f"bench decode --methods auto,scout,hgca --context 200 --change 0.1 --fetched 3 --kept 0.1 {STEPS}",
    "bench decode --methods full --context 200 --steps 4 --seconds 0 --shapes tiny --devices cpu,cpu",
    "bench prefill --methods transformers,offload --tokens 90 --chunk 40,whole --floor --device cpu --shapes tiny",
    f"{REQUESTS} --methods full,cpu --no-floor",
    f"{REQUESTS} --methods scout --change 0.1 --set budget=64",
    "bench ops --quick --mib 16 --seconds 0 --dtypes bf16",
    *(f"bench hgca --figure {n} --batch 2 --context 200 --window 64 {STEPS}" for n in (6, 10, 11, 12, 13, 15)),
    *(f"bench scout --figure {n} --budget 256 --batch 2 --context 200 {STEPS}" for n in (3, 8, 9, 10, 11, 12)),
]
ON_A_MODEL = [
    "bench scout --figure 6 --text text.txt --prefill 90 --decode 4 --budget 128",
    f"eval sweep {TEXT} full scout hcattention-paper,tau=0.9|1,groups=8,centroids=16",
    f"eval sweep {TEXT} --budget 25% --out sweep.json full scout auto hgca",
    f"eval attention {TEXT} --budget 64",
    "eval audit --text text.txt --length 240 --prefill 230 --decode 4 --quality 0.9 --set window_blocks=1",
    "eval table --length 300 --text text.txt --limit 1 --kl 2 --raw --budget 50% --out table.json --rows full,auto,duo",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), template)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text, and rates of this machine that are not measured."""
    monkeypatch.setattr("coattn_lab.bench.limits.measure", lambda *_: {**NONE, "dram_gbps": 10.0})
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(f"w{i * i % 157}" for i in range(400)), encoding="utf-8")


def assert_runs(*arguments: str) -> None:
    done = coattn_lab(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert {"command", "commit", "tree", "hardware"} <= set(json.loads(done.stdout))


@pytest.mark.parametrize("command", ALONE)
def test_on_random_weights(command: str) -> None:
    assert_runs(*command.split())


@pytest.mark.parametrize("command", ON_A_MODEL)
def test_on_a_model(command: str, folder: Path) -> None:
    assert_runs(*command.split(), "--model", str(folder))


def test_prompts_are_made_answered_and_made_a_table_of(folder: Path) -> None:
    make = "eval tasks make p.jsonl --benchmarks needle,longbench --data data --lengths 400 --samples 2 --depths 1"
    Path("data").mkdir()
    rows = [{"input": f"q{i}", "context": "w1 w2 " * 300, "answers": ["w3"], "all_classes": ["w3"]} for i in range(3)]
    for name in ("qasper", "trec"):
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = coattn_lab(*make.split(), "--haystack", "text.txt", "--model", str(folder))
    assert "4 of longbench" in made.stderr
    run = "eval table --prompts p.jsonl --rows full,streaming,recent=32 --out out.json --batch 2 --kl 2 --json"
    done = coattn_lab(*run.split(), "--model", str(folder))
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert {line["row"] for line in lines} == {"full", "streaming,recent=32"}
    assert all({"qasper", "trec"} <= set(line["longbench"]["tasks"]) for line in lines)
    assert "| `streaming,recent=32` |" in coattn_lab("eval", "table", "out").stdout


def commands(group: click.Group, *path: str) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [path]
    for name, each in group.commands.items():
        found += commands(each, *path, name) if isinstance(each, click.Group) else [(*path, name)]
    return found


@pytest.mark.parametrize("path", commands(lab), ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    done = coattn_lab(*path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: coattn-lab {' '.join(path)}".rstrip())
