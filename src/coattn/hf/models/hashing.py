"""SHA-256 of files, read in pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coattn.hf.models.progress import Progress, silent

PIECE = 1 << 20


def sha256_of(path: Path, *, on_progress: Progress = silent) -> str:
    """Hexadecimal SHA-256 of a file. Reads all of it, a second per gigabyte; reports stage `check`."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            done += len(piece)
            on_progress("check", done, total)
    return digest.hexdigest()
