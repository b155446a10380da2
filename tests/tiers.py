"""Which cases of a test are quick, which run in every run, and which only on demand: by measured time.

`seconds.json` holds how many seconds of a processor one case of a test function took, where all its cases took more
than `QUICK_SECONDS`. Of each function, quick cases take up to `QUICK_SECONDS` together, and all that run take up to
`RUN_SECONDS`, or are one; of those marked `whole` all run. The rest of a matrix runs with `COATTN_EVERY=1`. The sample
is drawn by the function's name: always the same.
"""

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest

QUICK_SECONDS, RUN_SECONDS = 0.5, 2.0
SECONDS = Path(__file__).with_name("seconds.json")


def function_of(nodeid: str) -> str:
    """`tests/a.py::test_b[case]` -> `tests/a.py::test_b`."""
    return nodeid.partition("[")[0]


def split(items: list[pytest.Item], seconds: Mapping[str, float]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests -> those that run and those that do not; of those that run, the ones that are not quick are marked slow."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "gpu" not in item.keywords:
            functions[function_of(item.nodeid)].append(item)
    left_out: set[pytest.Item] = set()
    for name in functions.keys() & seconds.keys():
        cases, each = functions[name], seconds[name]
        order = random.Random(name).sample(cases, len(cases))
        order.sort(key=lambda item: "slow" in item.keywords)
        run = max(1, round(RUN_SECONDS / each))
        for item in order[int(QUICK_SECONDS / each) :]:
            item.add_marker(pytest.mark.slow)
        left_out.update(item for item in order[run:] if "whole" not in item.keywords)
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what runs on demand only."""
    if os.environ.get("COATTN_EVERY") or config.option.keyword:
        return
    kept, left_out = split(items, json.loads(SECONDS.read_text()))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def processor_seconds(pid: str = "self") -> float:
    """Of a process and of all that it has started, also of those that still run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children))


@contextmanager
def timed(nodeid: str) -> Iterator[None]:
    """Appends what a test takes to the file $COATTN_SECONDS, where that is set."""
    path = os.environ.get("COATTN_SECONDS")
    begun = processor_seconds() if path else 0.0
    yield
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{processor_seconds() - begun:.3f} {nodeid}\n")


def measure(lines: Iterable[str]) -> dict[str, float]:
    """Lines of that file -> the contents of `seconds.json`."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        seconds, _, nodeid = line.rstrip("\n").partition(" ")
        found[function_of(nodeid)].append(float(seconds))
    return {name: round(fmean(each), 3) for name, each in sorted(found.items()) if sum(each) > QUICK_SECONDS}


if __name__ == "__main__":
    import sys

    SECONDS.write_text(json.dumps(measure(sys.stdin), indent=2) + "\n")
