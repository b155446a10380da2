"""Tensors in one safetensors file that is checked wholly before anything in it is used.

Its metadata holds facts, such as the model that it was written for, and the SHA-256 of every tensor with its name, type
and shape. A seal, the SHA-256 of the file's header, says that of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

UNSEALED = "0" * 64
MARK = b'"seal":"'
"""Before the seal in a header; inside a text its quotes would be escaped."""
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError)
"""What `read` raises for a file that differs by a bit from what was written."""


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], form: str, sync: bool = True) -> None:
    """Written under another name, then renamed: a reader sees the old file or the new. Raises OSError, SafetensorError.

    form: what kind of file it is. sync: whether it has to outlast the machine's failure.
    """
    held = {key: x.contiguous() for key, x in tensors.items()}
    digests = {key: _digest(key, x) for key, x in held.items()}
    metadata = {
        "format": form,
        "facts": json.dumps(facts, sort_keys=True),
        "digests": json.dumps(digests, sort_keys=True),
        "seal": UNSEALED,
    }
    draft = path.parent / f".{path.stem}.{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(held, str(draft), metadata)
        with draft.open("r+b") as file:
            header = _header(file.read(8), file.read)
            file.seek(8 + header.index(MARK + UNSEALED.encode()) + len(MARK))
            file.write(_seal(header).encode())
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(draft, 0o600)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def read(path: Path, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts, as they were written. Raises one of `DAMAGED`; FileNotFoundError where there is none."""
    with path.open("rb") as file:
        header = _header(file.read(8), file.read)
    with safe_open(str(path), "pt") as opened:
        metadata = opened.metadata() or {}
        if metadata.get("format") != form:
            raise ValueError(f"its format is {str(metadata.get('format'))[:40]!r}, not {form!r}")
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
