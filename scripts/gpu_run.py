"""Runs every test that needs a GPU and writes what came out, for tests/gpu_run.json.

    python scripts/gpu_run.py COMMIT --out tests/gpu_run.json

COMMIT is the one whose files these are: a machine with a GPU may have a copy without its history. The tests run in
--processes processes on one GPU, each with tests of its own, and then those marked `alone`, which hold measured times
against each other; those with the embedded model, where that is there.
Exit code 1 where a test failed; the file says so too, and tests/test_gpu_run.py refuses it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from run_tests import NOTHING, read_closing

ROOT = Path(__file__).resolve().parents[1]
SLICE_TESTS = 4
"""Most tests of one file that a process gets at a time."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def collect(marks: str, places: list[str]) -> dict[str, list[str]]:
    """Test file -> its tests that have these marks. A file that cannot be imported counts as one test."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-q", "-m", marks, *places], cwd=ROOT, capture_output=True, text=True
    )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        test, error = re.match(r"(\S+\.py)::", line), re.match(r"ERROR (\S+\.py)", line)
        if test:
            found.setdefault(test[1], []).append(line)
        elif error:
            found.setdefault(error[1], []).append(error[1])
    return found


def files_of(place: Path) -> list[Path]:
    """The files of tests in a folder, or the one that is named."""
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


def divide(files: Mapping[str, list[str]], parts: int) -> list[list[str]]:
    """The tests in so many lists, of about as many each; none is empty. A file with few tests stays together."""
    slices = [tests[i : i + SLICE_TESTS] for tests in files.values() for i in range(0, len(tests), SLICE_TESTS)]
    lists: list[list[str]] = [[] for _ in range(min(parts, len(slices)))]
    for tests in sorted(slices, key=len, reverse=True):
        min(lists, key=len).extend(tests)
    return lists


def run(marks: str, tests: list[str]) -> tuple[Counter[str], str]:
    """Counts of these tests, and what pytest printed. A process that ends before pytest does counts as an error."""
    options = ("-q", "--tb=short", "-rfE", "--continue-on-collection-errors", "-m", marks)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:  # there are more of them than fit on a command line
        names.write("\n".join(tests))
        names.flush()
        done = subprocess.run(
            [*PYTEST, *options, f"@{names.name}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            print(line, flush=True)
    counts = next((found for line in reversed(lines) if (found := read_closing(line)) is not None), Counter[str]())
    if (done.returncode in (0, 1) and counts) or done.returncode == NOTHING:
        return counts, done.stdout
    said = f"pytest ended with {done.returncode} over {tests[0]} and {len(tests) - 1} more"
    print(said, flush=True)
    return counts + Counter(errors=1), f"{done.stdout}{said}\n"


def describe(commit: str, marks: str, counts: Counter[str]) -> dict[str, object]:
    """What tests/gpu_run.json holds."""
    import torch

    from coattn.provenance import package_version

    names = ("torch", "triton", "transformers")
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "marks": marks,
        **{word: counts[word] for word in ("passed", "failed", "errors", "skipped")},
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in names}},
    }


def main() -> int:
    """Runs the tests, writes the file."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("commit", help="40 hexadecimal digits, as `git rev-parse HEAD` says")
    ask.add_argument(
        "places", nargs="*", default=["tests", "lab/tests"], help="folders or files of tests; default: all"
    )
    ask.add_argument("--out", type=Path, default=ROOT / "tests" / "gpu_run.json")
    ask.add_argument("--log", type=Path, help="a file for what pytest prints")
    ask.add_argument("--processes", type=int, default=8)
    given = ask.parse_args()
    if re.fullmatch("[0-9a-f]{40}", given.commit) is None:
        ask.error(f"{given.commit!r} is no commit: give what `git rev-parse HEAD` says")
    import torch

    from coattn.hf.models import list_models

    if not torch.cuda.is_available():
        ask.error("this machine has no GPU that PyTorch can use")
    ready = any(info["name"] == "smollm2" and info["state"] == "ready" for info in list_models())
    marks = "gpu" if ready else "gpu and not model"
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    lists = divide(collect(f"{marks} and not alone", given.places), given.processes)
    with ThreadPoolExecutor(max(1, len(lists))) as pool:
        done = [job.result() for job in [pool.submit(run, marks, tests) for tests in lists]]
    timed = [
        file for place in given.places for file in files_of(ROOT / place) if "mark.alone" in file.read_text("utf-8")
    ]
    if timed:  # looked for in these files alone: to import every test takes as long as to run some
        done.append(run(f"{marks} and alone", [str(file.relative_to(ROOT)) for file in timed]))
    counts = sum((found for found, _ in done), Counter[str]())
    if given.log is not None:
        given.log.write_text("\n".join(text for _, text in done), encoding="utf-8")
    made = describe(given.commit, marks, counts)
    given.out.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(made))
    return 1 if counts["failed"] or counts["errors"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
