"""A session on disk: one safetensors file. All of it is checked before anything is stored.

Its metadata says for which model, row and tokenizer it was written, and the SHA-256 of every tensor with its name, type
and shape. A seal, the SHA-256 of the file's header, says that of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coattn.errors import InputError
from coattn.models.cache import cache_dir

FORMAT = "coattn-session-1"
SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
UNSEALED = "0" * 64
MARK = b'"seal":"'
"""Before the seal in a header; inside a text its quotes would be escaped."""
SAVED_HINT = "Delete it and start again, or open it as it was saved."


class Sessions:
    """A folder of them, by name."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: by default `sessions` in coattn's cache folder."""
        self.folder = cache_dir() / "sessions" if folder is None else folder

    def path(self, name: object) -> Path:
        """Where a session is, or would be. Raises InputError for what is no name."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or name.endswith("."):
            raise InputError(
                f"{str(name)[:80]!r} is no name of a session.",
                "A name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit.",
            )
        return self.folder / (name + SUFFIX)

    def names(self) -> list[str]:
        """Of all that are saved."""
        found = (each.name.removesuffix(SUFFIX) for each in self.folder.glob("*" + SUFFIX))
        return sorted(name for name in found if NAME.fullmatch(name))

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def delete(self, name: str) -> None:
        """Raises InputError where there is none."""
        try:
            self.path(name).unlink()
        except OSError as error:
            raise InputError(f"There is no session {name!r} to delete: {error.strerror}.", self._hint()) from None

    def save(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Written beside and renamed: whoever looks sees the old file or the new one."""
        path = self.path(name)
        held = {key: x.contiguous() for key, x in tensors.items()}
        digests = {key: _digest(key, x) for key, x in held.items()}
        metadata = {
            "format": FORMAT,
            "facts": json.dumps(facts, sort_keys=True),
            "digests": json.dumps(digests, sort_keys=True),
            "seal": UNSEALED,
        }
        beside = self.folder / f".{name}.{uuid.uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(held, str(beside), metadata)
            with beside.open("r+b") as file:
                header = _header(file.read(8), file.read)
                file.seek(8 + header.index(MARK + UNSEALED.encode()) + len(MARK))
                file.write(_seal(header).encode())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, 0o600)
            os.replace(beside, path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"Session {name!r} cannot be saved: {error}.", "Free some space there.") from None
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
        return path

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts, as they were saved. Raises InputError where anything differs by a bit."""
        path = self.path(name)
        try:
            return _load(path)
        except FileNotFoundError:
            raise InputError(f"There is no session {name!r}.", self._hint()) from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            said = " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__
            raise InputError(f"Session {name!r} is damaged: {said}.", SAVED_HINT) from None

    def _hint(self) -> str:
        names = self.names()
        return f"Saved are: {', '.join(names[:20])}." if names else "None is saved."


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with path.open("rb") as file:
        header = _header(file.read(8), file.read)
    with safe_open(str(path), "pt") as opened:
        metadata = opened.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {str(metadata.get('format'))[:40]!r}, not {FORMAT!r}")
        seal = str(metadata["seal"])
        unsealed = header.replace(MARK + seal.encode(), MARK + UNSEALED.encode())
        if len(seal) != 64 or _seal(unsealed) != seal:
            raise ValueError("its header does not match its seal")
        digests = json.loads(metadata["digests"])
        if set(digests) != set(opened.keys()):
            raise ValueError("its tensors are not those that it lists")
        tensors = {}
        for key in digests:
            tensors[key] = opened.get_tensor(key)
            if _digest(key, tensors[key]) != digests[key]:
                raise ValueError(f"tensor {key!r} does not match its digest")
    facts = json.loads(metadata["facts"])
    if not isinstance(facts, dict):
        raise ValueError("it says nothing of itself")
    return tensors, facts


def _header(length: bytes, read: Any) -> bytes:
    if len(length) != 8:
        raise ValueError("it is too short")
    (size,) = struct.unpack("<Q", length)
    if size > 100 << 20:
        raise ValueError("its header is too long")
    header: bytes = read(size)
    if len(header) != size:
        raise ValueError("it is too short")
    return header


def _seal(header: bytes) -> str:
    return hashlib.sha256(struct.pack("<Q", len(header)) + header).hexdigest()


def _digest(name: str, x: Tensor) -> str:
    made = hashlib.sha256(f"{name} {x.dtype} {list(x.shape)} ".encode())
    if x.numel():
        data: Any = x.flatten().view(torch.uint8).numpy()
        made.update(data)
    return made.hexdigest()
