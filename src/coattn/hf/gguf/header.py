"""What a GGUF file says about itself: its metadata, read without its weights. Half a second for a large vocabulary."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from coattn.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of numbers, by `struct`'s letters."""


def read_header(path: Path) -> dict[str, Any]:
    """Metadata by key; arrays are lists. Raises ModelError for what is no GGUF file, or only a part of one."""
    again = "Copy or download the file again."
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise ModelError(f"{path} is not a GGUF file.", "Give a GGUF file, a model folder or a name.")
            return _metadata(data, path)
    except (ValueError, struct.error, UnicodeDecodeError, IndexError, OverflowError, MemoryError):
        raise ModelError(f"{path} is empty, truncated or damaged.", again) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from None


def _metadata(data: mmap.mmap, path: Path) -> dict[str, Any]:
    version, _tensors, count = struct.unpack_from("<IQQ", data, 4)
    if version not in VERSIONS:
        raise ModelError(
            f"{path} is a GGUF file of version {version}, and coattn reads {VERSIONS[0]} and {VERSIONS[1]}.",
            "Convert the model again with a newer program.",
        )
    at, found = 24, {}
    for _ in range(count):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        found[key], at = _value(data, at + 4, kind)
    return found


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError(length)
    return data[at + 8 : end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == STRING:
        return _string(data, at)
    if kind != ARRAY:
        form = f"<{_number(kind)}"
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    kind, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind not in (STRING, ARRAY):
        form = f"<{length}{_number(kind)}"
        return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    found = []
    for _ in range(length):
        value, at = _value(data, at, kind)
        found.append(value)
    return found, at


def _number(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(kind)
    return NUMBERS[kind]
