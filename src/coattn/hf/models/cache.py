"""Where converted models live, and how one is put there so that nobody ever sees half of it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coattn.errors import ModelError

LOCK_SECONDS = 1800.0
"""How long to wait for another process that is fetching the same model: a slow network takes minutes."""


def cache_dir() -> Path:
    """`$COATTN_CACHE`, else the user's cache folder. Makes nothing."""
    if chosen := os.environ.get("COATTN_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "coattn"


def model_dir(name: str) -> Path:
    """The folder in which the converted model `name` lies, or would lie."""
    return cache_dir() / "models" / name


@contextmanager
def locked(name: str, *, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the right to write model `name`. The system frees it when its process dies: it cannot go stale."""
    root = model_dir(name).parent
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f".{name}.lock", timeout=timeout)
        try:
            lock.acquire()
        except Timeout:
            raise ModelError(
                f"Another process has been getting the model {name} for {timeout:.0f} seconds.",
                f"Wait for it, or end it and remove {root / f'.{name}.lock'}.",
            ) from None
    try:
        _sweep(root, name)
        yield
    finally:
        lock.release()


@contextmanager
def workspace(name: str) -> Iterator[Path]:
    """A new empty folder on the file system of the model's; gone afterwards. Call it under `locked`."""
    folder = model_dir(name).parent / f".{name}.{uuid.uuid4().hex}"
    with writing(folder.parent):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(made: Path, name: str) -> Path:
    """Move the finished folder `made` to the model's place, replacing what is there. Under `locked`."""
    target = model_dir(name)
    with writing(target.parent):
        if target.exists():
            # A folder with files cannot be replaced; readers see the old one, nothing, or the new one.
            os.replace(target, made.with_name(f"{made.name}.old"))
        os.replace(made, target)
    return target


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk, a folder without permission and their like into one sentence and a hint."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"The model cannot be written to {folder}: {error.strerror or error}.",
            "Make room or permit writing there, or set COATTN_CACHE to another folder.",
        ) from error


def _sweep(root: Path, name: str) -> None:
    """Remove what a killed process left. Safe under the lock: no workspace of this model is in use."""
    for path in root.glob(f".{name}.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
