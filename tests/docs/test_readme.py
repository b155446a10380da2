"""README, docs/attach.md and docs/choosing.md: code runs, and what fits on 24 GB is as `coattn plan` says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from coattn.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHOOSING = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
ATTACH = (ROOT / "docs" / "attach.md").read_text(encoding="utf-8")
BLOCKS = [re.findall(r"```python\n(.*?)```", page, re.DOTALL) for page in (README, ATTACH)]
KNOWN = "Qwen/Qwen2.5-7B-Instruct"


def run(code: str, folder: Path) -> str:
    """stdout of a program, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_one_program_of_a_known_model() -> None:
    assert len(BLOCKS[0]) == 1
    assert KNOWN in BLOCKS[0][0]
    assert len([line for line in BLOCKS[0][0].splitlines() if line]) <= 8


@pytest.mark.model
def test_the_readme_as_printed_answers_both_under_a_small_model(tmp_path: Path) -> None:
    lines = run(BLOCKS[0][0].replace(KNOWN, "smollm2"), tmp_path).splitlines()
    assert sum(line.endswith(("length", "stop")) for line in lines) == 2
    assert lines[-1] in ("full True", "auto False")


@pytest.mark.model
def test_attach_as_printed_keeps_to_its_budget(tmp_path: Path) -> None:
    out = run(BLOCKS[1][0], tmp_path)
    report = eval(out.strip().splitlines()[-1], {})
    assert report["method"] == "offload"
    assert report["exact"] is True
    assert 0 < report["gpu_kv_peak"] <= 4 << 20
    assert report["host_kv_peak"] > 4 << 20


def test_what_fits_is_what_the_plan_says() -> None:
    (command,) = re.findall(r"`coattn (plan .*?)`", CHOOSING)
    done = CliRunner().invoke(cli, [*command.split(), "--json"])
    assert done.exit_code == 0, done.output
    table = CHOOSING.split("## An example: 200,000 tokens")[1].split("The last two columns")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| `"]
    found = json.loads(done.stdout)["methods"]
    assert [row[0] for row in cells] == [f"`{row['method']}`" for row in found]
    for said, row in zip(cells, found, strict=True):
        assert said[1:4] == [gib(row["gpu"]), gib(row["dram"]) if row["dram"] else "0", "yes" if row["fits"] else "no"]
        assert said[5:] == [f"{row['first_token_s']:,.0f} s", f"{1 / row['step_s']:,.1f}"]


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
