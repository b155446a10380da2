"""The record beside a converted model: what it was made from, by what, and every file's size and hash."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from coattn.hf.models.hashing import sha256_of
from coattn.hf.models.progress import Progress, silent

FILE = "coattn-model.json"
FORMAT = 1
"""Raise when the conversion changes: a folder of another format counts as not there and is made again."""


class Source(Protocol):
    """What a converted model is made from: a model of the catalog, or a file."""

    @property
    def name(self) -> str: ...
    @property
    def requirement(self) -> str: ...
    @property
    def gguf_sha256(self) -> str: ...


@dataclass(frozen=True)
class Manifest:
    """Contents of `coattn-model.json`; `files` maps each file name to its bytes and SHA-256."""

    format: int
    name: str
    source: str
    gguf_sha256: str
    made_with: dict[str, str]
    files: dict[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Size of the model on disk, the manifest itself not counted."""
        return sum(size for size, _ in self.files.values())


def write(folder: Path, entry: Source, made_with: dict[str, str]) -> Manifest:
    """Hash every file of `folder` and write its manifest. Reads all of the folder once."""
    files = {
        path.name: (path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE
    }
    manifest = Manifest(FORMAT, entry.name, entry.requirement, entry.gguf_sha256, made_with, files)
    (folder / FILE).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest


def read(folder: Path) -> Manifest | None:
    """The manifest of `folder`, or None when there is none or it cannot be understood."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in data.pop("files").items()}
        return Manifest(files=files, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def fault(folder: Path, entry: Source, *, verify: bool = False, on_progress: Progress = silent) -> str | None:
    """Why `folder` cannot serve as the converted `entry`, or None when it can.

    Looks at sizes only (microseconds); with `verify` it also hashes every file (about a second per gigabyte).
    """
    manifest = read(folder)
    if manifest is None:
        return "it has no readable manifest" if folder.is_dir() else "it is not there"
    if manifest.format != FORMAT or manifest.gguf_sha256 != entry.gguf_sha256:
        return "it was made by another version"
    if not manifest.files:
        return "its manifest is empty"
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has the wrong size"
        if verify and sha256_of(path, on_progress=on_progress) != digest:
            return f"{name} is altered"
    return None
