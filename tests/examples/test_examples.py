"""Every example runs as a reader would run it, and says what its text promises."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from tests.loaded_once import loaded_once

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

__all__ = ["loaded_once"]
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.usefixtures("loaded_once")]


def run(name: str, folder: Path) -> str:
    """stdout of an example, started from another folder."""
    out, path = io.StringIO(), str(EXAMPLES / name)
    with pytest.MonkeyPatch.context() as here, redirect_stdout(out), mock.patch("sys.argv", [path]):
        here.chdir(folder)
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def test_batch_answers_together(tmp_path: Path) -> None:
    out = run("batch.py", tmp_path)
    assert "Paris" in out
    assert "decode steps under cpu" in out


def test_attach_generate_answers_from_a_small_gpu_tier(tmp_path: Path) -> None:
    out = run("attach_generate.py", tmp_path)
    assert "under offload, exact: True" in out
    gpu = re.search(r"GPU tier: ([\d.]+) MiB at most, of 4MiB", out)
    dram = re.search(r"DRAM: ([\d.]+) MiB", out)
    assert float(gpu[1]) <= 4.0
    assert float(dram[1]) > 4 * float(gpu[1])
    assert "58213" in out.split("answer:")[1]


def test_multi_turn_reads_only_what_is_new_and_remembers(tmp_path: Path) -> None:
    lines = run("multi_turn.py", tmp_path).splitlines()
    found = [re.fullmatch(r"(\d+) tokens, (\d+) of them known, (\d+) read: (.*)", line) for line in lines]
    assert len(found) == 3
    assert all(found)
    lengths, known, read = ([int(match[i]) for match in found if match] for i in (1, 2, 3))
    assert known[0] == 0
    assert all(k > before for k, before in zip(known[1:], lengths, strict=False)), "the answers are in the cache too"
    assert all(n < 30 for n in read)
    for match, city in zip(found, ("Turin", "Milan", "Turin"), strict=True):
        assert city in match[4]


def test_two_questions_about_a_text_that_is_read_once(tmp_path: Path) -> None:
    first, second, held = run("native_cache.py", tmp_path).splitlines()
    read = [re.match(r"(\d+) of (\d+) tokens read: ", line) for line in (first, second)]
    assert [bool(match) and match[1] == match[2] for match in read] == [True, False]
    assert "city of Paris" in first
    assert "as a nurse" in second
    assert int(held.split()[0].replace(",", "")) > 4 << 20


def test_own_rows_run_and_the_exact_one_equals_full(tmp_path: Path) -> None:
    out = run("own_row.py", tmp_path)
    row = r"{}: exact {}, GPU tier ([\d,]+) bytes, DRAM ([\d,]+) bytes, (\d+) of 16 tokens"
    sizes = {}
    for name, exact in (("full", True), ("recent-on-gpu", True), ("short-memory", False)):
        match = re.search(row.format(name, exact), out)
        assert match is not None, out
        sizes[name] = int(match[1].replace(",", "")), int(match[2].replace(",", ""))
        if exact:
            assert match[3] == "16"
    assert sizes["recent-on-gpu"][0] < sizes["full"][0]
    assert sizes["recent-on-gpu"][1] > 0
    assert sizes["short-memory"][0] < sizes["recent-on-gpu"][0]
    assert sizes["short-memory"][1] == 0


def test_compare_fidelity_tells_exact_from_lossy(tmp_path: Path) -> None:
    lines = run("compare_fidelity.py", tmp_path).splitlines()[1:]
    cells = [line.split() for line in lines]
    kl = {" ".join(row[:-2]): float(row[-2]) for row in cells}
    assert list(kl) == ["offload", "cpu", "streaming sinks=4 recent=124", "streaming sinks=4 recent=28"]
    assert kl["offload"] < 1e-6
    assert kl["cpu"] < 1e-6
    assert kl["streaming sinks=4 recent=28"] > 1e-3


def test_a_prompt_read_by_one_process_is_answered_by_another(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "prefill_elsewhere.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    match = re.search(r"(\d+) tokens handed over, 0 read here: (.*)", out)
    assert match is not None, out
    assert int(match[1]) > 400
    assert "Paris" in match[2]


def test_every_example_is_short_and_tested() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == [
        "attach_generate.py", "batch.py", "compare_fidelity.py", "multi_turn.py", "native_cache.py", "own_row.py",
        "prefill_elsewhere.py"
    ]  # fmt: skip
    for name in names:
        assert len((EXAMPLES / name).read_text().splitlines()) < 40, name
