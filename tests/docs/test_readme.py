"""What README.md and docs/choosing.md promise: code runs, and 200,000 tokens on 24 GB are what `coattn plan` says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coattn.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PER_S = {"gpu": 1000e9, "pcie": 25e9, "dram": 60e9}
"""The rates that the page takes, bytes/s."""


def run(code: str, folder: Path) -> str:
    """stdout of a program, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_two_programs() -> None:
    assert ["coattn.attach" in BLOCKS[0], "coattn.LLM" in BLOCKS[1], len(BLOCKS)] == [True, True, 2]


@pytest.mark.model
def test_attach_as_printed_keeps_to_its_budget(tmp_path: Path) -> None:
    out = run(BLOCKS[0], tmp_path)
    report = eval(out.strip().splitlines()[-1], {})
    assert report["method"] == "offload"
    assert report["exact"] is True
    assert 0 < report["gpu_kv_peak"] <= 4 << 20
    assert report["host_kv_peak"] > 4 << 20


@pytest.mark.model
def test_llm_as_printed_answers_both(tmp_path: Path) -> None:
    lines = run(BLOCKS[1], tmp_path).splitlines()
    assert sum(line.endswith(("length", "stop")) for line in lines) == 2


def rows() -> dict[str, list[str]]:
    """The example's table: row as given on the command line -> cells."""
    table = CHOOSING.split("## An example: 200,000 tokens")[1].split("The last column")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row[1:] for row in cells}


def plan(row: str) -> dict[str, Any]:
    (command,) = re.findall(r"`coattn (plan .*?)`", CHOOSING)
    done = CliRunner().invoke(cli, [*command.replace("M --context", f"{row} --context").split(), "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


@pytest.mark.parametrize("row", rows())
def test_what_fits_is_what_the_plan_says(row: str) -> None:
    cells, found = rows()[row], plan(row)
    assert gib(found["weight_bytes"]) == "15.0 GiB"
    assert cells[0] == gib(found["gpu_bytes"])
    assert cells[1] == (gib(found["host_kv_bytes"]) if found["host_kv_bytes"] else "0")
    assert cells[2] == ("yes" if found["fits_gpu"] and found["fits_host"] else "no")


@pytest.mark.parametrize(("row", "link"), [("offload", "pcie"), ("cpu", "dram"), ("scout", None)])
def test_the_least_time_is_that_of_its_bytes(row: str, link: str | None) -> None:
    found = plan(row)
    seconds = found["gpu_bytes"] / PER_S["gpu"] + (found["host_kv_bytes"] / PER_S[link] if link else 0)
    assert rows()[row][4] == f"{seconds:.2f} s"


def test_the_least_time_of_codes_counts_lists_and_values() -> None:
    (row,) = [name for name in rows() if name.startswith("hcattention")]
    found, kept = plan(row), 0.124
    lists = kept * 200_000 * 32 * 8 * (4 + 4 * 4)  # 32 layers, 8 KV heads of 4 query heads
    times = [found["gpu_bytes"] / PER_S["gpu"], lists / PER_S["pcie"], kept * found["host_kv_bytes"] / PER_S["dram"]]
    assert rows()[row][4] == f"{sum(times):.2f} s"
