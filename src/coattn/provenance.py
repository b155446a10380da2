"""Where a result comes from: the source, the versions, the hardware and the command."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coattn._version import __version__
from coattn.errors import ConfigError

VARIABLE = "COATTN_COMMIT"
"""Names the commit if the source was copied without its history."""
PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
DIRTY = "-dirty"

arguments: list[str] = ["coattn", *sys.argv[1:]]
"""The command line; `cli.main` sets it when a program calls it."""


def provenance() -> dict[str, Any]:
    """What a reader needs to judge or repeat a result."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "versions": {"coattn": __version__, "python": platform.python_version()}
        | {name: package_version(name) for name in ("torch", "transformers")},
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu},
        "command": command_line(),
        "commit": commit(),
        "tree": tree(),
    }


def command_line() -> str:
    """The command as typed, with absolute paths cut to file names: a result does not show its author's folders."""
    return " ".join(Path(a).name if a.startswith("/") else a for a in arguments)


def commit() -> str | None:
    """The commit of this source, with `-dirty` if the files differ from it; None outside a repository.

    `$COATTN_COMMIT` overrides git. If git does not know that commit, the name is recorded unchecked; `tree` lets a
    reader with the history check it.
    """
    name = given_commit() or _git("rev-parse", "HEAD")
    committed = None if name is None else tree_of(name)
    return name if name is None or committed in (None, tree()) else name + DIRTY


def given_commit() -> str | None:
    """The value of `$COATTN_COMMIT`. Raises ConfigError if it is not a commit."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    if name and re.fullmatch("[0-9a-f]{7,40}", name) is None:
        raise ConfigError(f"{VARIABLE} is {name!r}, which is no commit.", "Give the output of `git rev-parse HEAD`.")
    return name or None


def tree() -> str:
    """A hash of the source files that run, without compiled files."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    sources = (path for path in files if path.suffix not in (".so", ".pyc") and "__pycache__" not in path.parts)
    blobs = {}
    for path in sources:  # by git's name of a file's content
        data = path.read_bytes()
        name = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        blobs[path.relative_to(PACKAGE).as_posix()] = name
    return _hash(blobs)


def tree_of(commit: str) -> str | None:
    """The same hash of a commit's files; None if git does not know the commit."""
    folder = "src/coattn/"
    listed = _git("ls-tree", "-r", commit, folder)
    if listed is None:
        return None
    rows = (line.split(maxsplit=3) for line in listed.splitlines())
    return _hash({path.removeprefix(folder): blob for _, _, blob, path in rows})


def _hash(blobs: dict[str, str]) -> str:
    lines = "".join(f"{blob} {path}\n" for path, blob in sorted(blobs.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """The output of git in this repository; None if there is no repository, no output, or git fails."""
    if not (ROOT / ".git").exists():
        return None
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None


def cpu_facts(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """What Linux says of the first core; nothing where it does not say."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}


def cpu_name() -> str:
    """The processor, as the system names it."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
