"""Benchmark files: a local folder, or a dataset of the hub, as JSONL."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.text import decode, read_bytes

SECONDS = 10.0
"""How long the hub may take to say that it has a dataset."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Table:
    """One JSONL file: its name without the ending, its rows, the SHA-256 of its bytes."""

    name: str
    rows: list[dict[str, Any]]
    sha256: str


def find_folder(data: str) -> Path:
    """The folder `data`, or a local copy of the hub's dataset of that name (network, once)."""
    folder = Path(data).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not HUB_NAME.fullmatch(data):
        raise InputError(
            f"There is no folder {data}.", "Give a folder with JSONL files, or a hub name (owner/dataset)."
        )
    return _fetch(data)


def _fetch(name: str) -> Path:
    """A copy of the hub's dataset; when the hub does not answer at once, the one that is here from before."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().dataset_info(name, timeout=SECONDS)
        local = False
    except Exception:  # asked once and briefly: the download itself would try for most of a minute
        local = True
    wanted = ["*.jsonl", "*.zip"]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted, local_files_only=local))
    except Exception as error:  # the client's transport library differs between its releases
        raise InputError(
            f"There is no folder {name} here, and the hub does not give a dataset {name}.",
            "Check the name and the network, or download the files and give their folder.",
        ) from error


def find_files(folder: Path) -> dict[str, Path]:
    """Every JSONL file below the folder: its path there without the ending -> its path.

    Archives at the top, such as LongBench's `data.zip`, are unpacked beside themselves, once.
    """
    for archive in sorted(folder.glob("*.zip")):
        _unpack(archive, folder / archive.stem)
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.jsonl"))}


def read_table(name: str, path: Path, keys: Iterable[str]) -> Table:
    """The rows of a JSONL file, each with at least `keys`."""
    data = read_bytes(path)
    wanted = set(keys)
    rows = []
    for i, line in enumerate(decode(data, str(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise InputError(f"{path}, line {i}, is not JSON.", "Each line must be one JSON object.") from None
        missing = sorted(wanted - set(row)) if isinstance(row, dict) else sorted(wanted)
        if missing:
            raise InputError(f"{path}, line {i}, lacks {', '.join(missing)}.", "Is this a file of the benchmark?")
        rows.append(row)
    return Table(name, rows, hashlib.sha256(data).hexdigest())


def digest(tables: Iterable[Table]) -> str:
    """One SHA-256 for all of them, whatever their order."""
    lines = sorted(f"{table.name} {table.sha256}\n" for table in tables)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _unpack(archive: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                if member.filename.endswith(".jsonl"):
                    opened.extract(member, target)  # zipfile strips absolute paths and `..`
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{archive} cannot be unpacked: {error}.", "Unpack it yourself, or download it again."
        ) from None
