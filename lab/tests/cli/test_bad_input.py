"""Bad input to `coattn-lab`: one sentence and a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.tests.run import coattn_lab
from tests.cli.folders import save_tiny

from tests.cli.test_bad_input import assert_refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "audit", "--set", "quality=0.9"], ["--set has a quality", "--quality"]),
        (["eval", "audit", "--set", "audit=false"], ["turns the audit off"]),
        (["eval", "sweep", "streaming", "--budget", "0%"], ["--budget has '0%'", "6%,12.5%"]),
        (["bench", "requests", "--prompts", "uniform:10:5"], ["10 is more than 5"]),
        (["bench", "decode", "--shapes", "tiny", "--methods", "auto", "--fetched", "-1"], ["--fetched"]),
        (["bench", "scout", "--set", "host_dtype=int9"], ["'int9'"]),
        (["eval", "attention", "--mass", "nan"], ["--mass", "finite"]),
        (["eval", "tasks", "make", "p.jsonl", "--benchmarks", "longbench"], ["--data is missing"]),
        (["eval", "table"], ["nothing to make a table of"]),
        (["bench", "hgca", "--figure", "7"], ["figure 7", "12"]),
        (["bench", "decode", "--shapes", "tiny", "--seconds", "inf"], ["--seconds", "finite"]),
        (["bench", "decode", "--shapes", "tiny", "--batch", "2147483647"], ["--batch", "65536"]),
        (["bench", "decode", "--devices", "cpu:0,cpu:1", "--device", "cpu"], ["Both --devices and --device"]),
        (["bench", "decode", "--devices", "cpu:0,cpu:1", "--peers"], ["--peers run on one device"]),
    ],
)
def test_refused_before_a_model_is_loaded(arguments: list[str], words: list[str]) -> None:
    assert_refused(coattn_lab(*arguments), *words)


def test_a_result_file_of_another_kind(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    row = ("eval", "sweep", "full", "--model", str(folder), "--length", "40", "--prefill", "30", "--decode", "4")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 150}" for i in range(60)), encoding="utf-8")
    done = coattn_lab(*row, "--text", str(text), "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    out.write_text(json.dumps({**found, "rows": [{}]}), encoding="utf-8")
    assert_refused(coattn_lab(*row, "--text", str(text), "--out", str(out)), "not those of such a run")
    # a row whose defaults were others when it was run
    found["settings"]["full"]["block"] = 8
    out.write_text(json.dumps(found), encoding="utf-8")
    assert_refused(
        coattn_lab(*row, "--text", str(text), "--out", str(out)), "another block of full of settings: 8, not 32"
    )
    assert json.loads(out.read_text(encoding="utf-8")) == found
