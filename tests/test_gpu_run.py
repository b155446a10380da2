"""tests/gpu_run.json says at which commit the tests on a GPU passed: they passed, and not long ago.

CI has no GPU. `scripts/gpu_run.py` writes the file on a machine that has one.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("gpu_run.json")
OLD = 60
"""Commits after which the tests should run on a GPU again."""
HOW = "run scripts/gpu_run.py on a machine with a GPU"


def git(*words: str, root: Path = ROOT) -> str | None:
    """What git prints of the repository at `root`, whichever one a hook may have named; None where it cannot say."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60, env=own)
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


def check_age(found: dict[str, Any], root: Path = ROOT) -> None:
    """Warns where the recorded run is many commits old; skips where its age cannot be told."""
    if found["commit"] is None:
        pytest.skip("no run is recorded")
    if git("rev-parse", "--is-shallow-repository", root=root) != "false":
        pytest.skip("there is no git here, or only a part of the history")
    age = git("rev-list", "--count", f"{found['commit']}..HEAD", root=root)
    if age is None:
        warnings.warn(f"the tests ran on a GPU at {found['commit']}, which is not in this history: {HOW}", stacklevel=2)
    elif int(age) > OLD:
        warnings.warn(f"the tests last ran on a GPU {age} commits ago: {HOW}", stacklevel=2)


def test_the_recorded_run_was_green() -> None:
    check_green(json.loads(FILE.read_text(encoding="utf-8")))


def test_the_recorded_run_is_not_old() -> None:
    check_age(json.loads(FILE.read_text(encoding="utf-8")))


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, str]:
    """A repository, and its commits that are three and two commits old, of which the first is too old."""
    monkeypatch.setattr(sys.modules[__name__], "OLD", 2)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git("init", "-q", root=tmp_path)
    for i in range(OLD + 2):
        git(*name, "commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", str(i), root=tmp_path)
    oldest, second = (git("rev-parse", f"HEAD~{n}", root=tmp_path) for n in (OLD + 1, OLD))
    assert oldest is not None
    assert second is not None
    return tmp_path, oldest, second


def test_a_run_warns_when_it_is_old(history: tuple[Path, str, str]) -> None:
    root, oldest, second = history
    with pytest.warns(UserWarning, match="3 commits ago"):
        check_age({"commit": oldest}, root)
    with warnings.catch_warnings(action="error"):
        check_age({"commit": second}, root)
    with pytest.warns(UserWarning, match="not in this history"):
        check_age({"commit": "0" * 40}, root)


def test_a_part_of_the_history_is_skipped(
    history: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shallow = tmp_path_factory.mktemp("clone") / "shallow"
    git("clone", "-q", "--depth", "1", history[0].as_uri(), str(shallow), root=history[0])
    for root in (shallow, tmp_path_factory.mktemp("nowhere")):
        with pytest.raises(pytest.skip.Exception):
            check_age({"commit": history[1]}, root)


@pytest.mark.parametrize("bad", [{"failed": 1}, {"errors": 2}, {"passed": 0}])
def test_a_run_that_was_not_green_fails(bad: dict[str, int]) -> None:
    green = {"commit": "1" * 40, "passed": 5, "failed": 0, "errors": 0, "skipped": 1}
    check_green(green)
    with pytest.raises(AssertionError):
        check_green({**green, **bad})


def test_no_run_at_all_warns() -> None:
    with pytest.warns(UserWarning, match="never"):
        check_green({"commit": None})
