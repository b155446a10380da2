"""Which cases of a test are quick, which run in every run, and which only on demand: by measured time.

`seconds.json` holds what one case of a test function took, where all its cases took more than a second. Of each
function, quick cases take up to `QUICK_SECONDS` together, and all that run take up to `RUN_SECONDS`, or are one. The
rest of a matrix runs with `COATTN_EVERY=1`. The sample is drawn by the function's name: always the same.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

QUICK_SECONDS, RUN_SECONDS = 0.8, 6.0
SECONDS = Path(__file__).with_name("seconds.json")
DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+([^\s\[]+)")


def function_of(nodeid: str) -> str:
    """`tests/a.py::test_b[case]` -> `tests/a.py::test_b`."""
    return nodeid.partition("[")[0]


def split(items: list[pytest.Item], seconds: Mapping[str, float]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests -> those that run and those that do not; of those that run, the ones that are not quick are marked slow."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "gpu" not in item.keywords and "model" not in item.keywords:
            functions[function_of(item.nodeid)].append(item)
    left_out: set[pytest.Item] = set()
    for name in functions.keys() & seconds.keys():
        cases, each = functions[name], seconds[name]
        order = random.Random(name).sample(cases, len(cases))
        order.sort(key=lambda item: "slow" in item.keywords)
        run = max(1, round(RUN_SECONDS / each))
        for item in order[int(QUICK_SECONDS / each) :]:
            item.add_marker(pytest.mark.slow)
        left_out.update(order[run:])
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what runs on demand only."""
    if os.environ.get("COATTN_EVERY") or config.option.keyword:
        return
    kept, left_out = split(items, json.loads(SECONDS.read_text()))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def measure(lines: Iterable[str]) -> dict[str, float]:
    """What pytest prints with `--durations=0 --durations-min=0` -> the contents of `seconds.json`."""
    total: dict[str, float] = defaultdict(float)
    cases: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if found := DURATION.match(line):
            total[found[2]] += float(found[1])
            cases[found[2]].add(line.split()[2])
    return {name: round(total[name] / len(cases[name]), 3) for name in sorted(total) if total[name] > 1}


if __name__ == "__main__":
    import sys

    SECONDS.write_text(json.dumps(measure(sys.stdin), indent=2) + "\n")
