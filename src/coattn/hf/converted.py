"""Converted models on disk: each in a folder of its own, checked by its manifest, never seen half made."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from coattn.errors import ModelError
from coattn.folders import cache_dir
from coattn.progress import silent as silent

Progress = Callable[[str, int, "int | None"], None]
"""`on_progress(stage, done, total)`: `stage` is `download`, `check`, `unpack`, `convert` or `load`.

`done` and `total` are bytes for `download` and steps otherwise. A stage is over when `done == total`.
"""

LOCK_SECONDS = 1800.0
"""How long to wait for another process that is making the same model: a slow network takes minutes."""
MANIFEST = "coattn-model.json"
"""What a converted model was made from, by what, and the bytes of its files."""
FORMAT = 2
"""Raise when the conversion changes: a folder of another format counts as not there and is made again."""


@contextmanager
def stage(name: str, on_progress: Progress) -> Iterator[None]:
    """A stage of one step is this block."""
    on_progress(name, 0, 1)
    yield
    on_progress(name, 1, 1)


def model_dir(name: str) -> Path:
    """The folder in which the converted model `name` lies, or would lie."""
    return cache_dir() / "models" / name


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file. Reads all of it, a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_once(name: str, source: str, sha256: str, fill: Callable[[Path, Path], dict[str, str]]) -> Path:
    """The folder of model `name`, made from a GGUF file with this hash; made now unless it is there and whole.

    fill: `(scratch folder, empty model folder) -> versions of the software that made it`. Several processes may call
    this at once: one makes the model, the others wait for it. A failure leaves nothing behind.
    """
    folder = model_dir(name)
    if find_fault(folder, sha256) is None:
        return folder
    with _locked(folder):
        if find_fault(folder, sha256) is None:
            return folder
        scratch = TemporaryDirectory(prefix=f".{name}.", dir=folder.parent, ignore_cleanup_errors=True)
        with _writing(folder.parent), scratch as at:
            made = Path(at) / "model"
            made.mkdir()
            made_with = fill(Path(at), made)
            files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
            record = {"format": FORMAT, "name": name, "source": source, "gguf_sha256": sha256}
            record |= {"made_with": made_with, "files": files}
            (made / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            if folder.exists():  # a folder with files cannot be replaced; readers see the old one, none, or the new one
                os.replace(folder, Path(at) / "old")
            os.replace(made, folder)
    return folder


def find_fault(folder: Path, sha256: str) -> str | None:
    """Why `folder` cannot serve as the model made from the file with this hash, or None when it can; by sizes alone."""
    try:
        record: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in record["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return "it has no readable manifest" if folder.is_dir() else "it is not there"
    if record.get("format") != FORMAT or record.get("gguf_sha256") != sha256:
        return "it was made by another version"
    if not files:
        return "its manifest is empty"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has the wrong size"
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the right to write `folder`. The system frees it when its process dies: it cannot go stale."""
    path = folder.with_name(f".{folder.name}.lock")
    with _writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(path).acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise ModelError(
                f"Another process has been making the model {folder.name} for {LOCK_SECONDS:.0f} seconds.",
                f"Wait for it, or end it and remove {path}.",
            ) from None
    with lock:
        for left in folder.parent.glob(f".{folder.name}.*"):  # by a killed process: nobody else works here now
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn a full disk, a folder without permission and their like into one sentence and a hint."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"The model cannot be written to {folder}: {error.strerror or error}.",
            "Make room or permit writing there, or set COATTN_CACHE to another folder.",
        ) from error
