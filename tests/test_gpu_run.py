"""tests/gpu_run.json says at which commit the tests on a GPU passed: they passed, and not long ago.

CI has no GPU. `scripts/gpu_run.py` writes the file on a machine that has one.
"""

import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("gpu_run.json")
OLD = 60
"""Commits after which the tests should run on a GPU again."""
HOW = "run scripts/gpu_run.py on a machine with a GPU"


def git(*words: str) -> str | None:
    """What git prints of this repository, whichever one a hook may have named; None where it cannot say."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, env=own)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_green(found: dict[str, Any]) -> None:
    """Fails where the recorded run was not green; warns where there was none."""
    if found["commit"] is None:
        warnings.warn(f"the tests on a GPU were never recorded as green: {HOW}", stacklevel=2)
        return
    bad = {word: found[word] for word in ("failed", "errors") if found[word]}
    assert not bad, f"at {found['commit'][:12]} tests failed on a GPU: {bad}"
    assert found["passed"] > 0, "no test ran"


def test_the_recorded_run_was_green() -> None:
    check_green(json.loads(FILE.read_text(encoding="utf-8")))


def test_the_recorded_run_is_not_old() -> None:
    """Warns where it is many commits old; skips where its age cannot be told."""
    commit = json.loads(FILE.read_text(encoding="utf-8"))["commit"]
    if commit is None or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no run is recorded, there is no git here, or only a part of the history")
    age = git("rev-list", "--count", f"{commit}..HEAD")
    if age is None:
        warnings.warn(f"the tests ran on a GPU at {commit}, which is not in this history: {HOW}", stacklevel=2)
    elif int(age) > OLD:
        warnings.warn(f"the tests last ran on a GPU {age} commits ago: {HOW}", stacklevel=2)


@pytest.mark.parametrize("bad", [{"failed": 1}, {"errors": 2}, {"passed": 0}])
def test_a_run_that_was_not_green_fails(bad: dict[str, int]) -> None:
    green = {"commit": "1" * 40, "passed": 5, "failed": 0, "errors": 0, "skipped": 1}
    check_green(green)
    with pytest.raises(AssertionError):
        check_green({**green, **bad})
