"""Which source this runs from: a commit, and a hash of the source files by which the commit can be checked."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from coattn.errors import ConfigError

VARIABLE = "COATTN_COMMIT"
"""Names the commit where the source was copied without its history."""
PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
DIRTY = "-dirty"


def commit() -> str | None:
    """The commit of this source, with a mark when the source is not that commit's; None where nobody says.

    `$COATTN_COMMIT` goes before what git says. Where git knows that commit, its source is compared with the files that
    run; elsewhere it is recorded as given, and whoever has the history can compare it with `tree`.
    """
    found = given() or _git("rev-parse", "HEAD")
    if found is None:
        return None
    there = tree_of(found)
    return found if there is None or there == tree() else found + DIRTY


def given() -> str | None:
    """What `$COATTN_COMMIT` says; raises ConfigError where that is no commit."""
    found = os.environ.get(VARIABLE, "").strip().lower()
    if found and not is_clean(found):
        raise ConfigError(f"{VARIABLE} is {found!r}, which is no commit.", "Give what `git rev-parse HEAD` says.")
    return found or None


def is_clean(found: object) -> bool:
    """Whether a recorded commit is there and says nothing of changes."""
    return isinstance(found, str) and re.fullmatch("[0-9a-f]{7,40}", found) is not None


def tree() -> str:
    """A hash of the source files that run, compiled ones left out."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    sources = (path for path in files if path.suffix not in (".so", ".pyc") and "__pycache__" not in path.parts)
    return _hash((_blob(path.read_bytes()), path.relative_to(PACKAGE).as_posix()) for path in sources)


def tree_of(found: str) -> str | None:
    """The same hash of a commit's files; None where git does not know the commit."""
    folder = "src/coattn/"
    listed = _git("ls-tree", "-r", found, folder) if (ROOT / ".git").exists() else None
    if not listed:
        return None
    rows = (line.split(maxsplit=3) for line in listed.splitlines())
    return _hash((blob, path.removeprefix(folder)) for _, _, blob, path in rows)


def _hash(files: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{blob} {path}\n" for path, blob in sorted((path, blob) for blob, path in files))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _blob(data: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git(*arguments: str) -> str | None:
    """What git prints in the repository this runs from; None where there is none, or it fails."""
    if not (ROOT / ".git").exists():
        return None
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None
