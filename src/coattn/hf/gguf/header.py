"""A GGUF file by what it says about itself: its metadata, and where its weights lie. Half a second for large
vocabularies."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coattn.errors import ModelError
from coattn.hf.converted import Progress, sha256_of, silent, stage

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of numbers, by `struct`'s letters."""
ALIGNMENT, MOST_DIMENSIONS = 32, 4
SIZES: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66),
    39: (32, 17), 40: (64, 36),
}  # fmt: skip
"""By the number of a type of tensors: weights in a block, and its bytes."""


ARCHITECTURES = ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""What both Transformers reads from GGUF and coattn runs."""


class Stored(NamedTuple):
    """A tensor in a file."""

    kind: int
    """GGUF's number of the type in which it is stored."""
    shape: tuple[int, ...]
    """Of the numbers, the rows first."""
    start: int
    size: int
    """Where its bytes are in the file."""


@dataclass(frozen=True)
class GgufFile:
    """A file, by what is in it. name: its model's own name and the first digits of the hash."""

    path: Path
    name: str
    sha256: str
    header: dict[str, Any]


def open_gguf(path: Path, on_progress: Progress = silent) -> GgufFile:
    """Reads the metadata and the hash. Raises ModelError for a file that cannot be run here, in one sentence."""
    header = read_header(path)
    kind = header.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of the architecture {kind!r}, which coattn does not run from a GGUF file.",
            f"It reads {', '.join(ARCHITECTURES)}. Other families run from a model folder.",
        )
    if not header.get("tokenizer.ggml.tokens"):
        raise ModelError(f"{path} has no tokenizer.", "Give the file of a whole model.")
    with stage("check", on_progress):
        sha256 = sha256_of(path)
    said = str(header.get("general.name") or path.stem)
    name = "-".join("".join(c if c.isalnum() or c in "._-" else " " for c in said).split())
    return GgufFile(path, f"{name or 'gguf'}@{sha256[:12]}", sha256, header)


def read_header(path: Path) -> dict[str, Any]:
    """Metadata by key; arrays are lists. Raises ModelError for what is no GGUF file, or only a part of one."""
    return _read(path)[0]


def read_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor by its name. Raises ModelError as `read_header` does, and for what ends before its tensors do."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise ModelError(f"{path} is not a GGUF file.", "Give a GGUF file, a model folder or a name.")
            header, at = _metadata(data, path)
            return header, _tensors(data, at, int(header.get("general.alignment", ALIGNMENT)), path)
    except (ValueError, struct.error, UnicodeDecodeError, LookupError, OverflowError, MemoryError, ArithmeticError):
        raise ModelError(f"{path} is empty, truncated or damaged.", "Copy or download the file again.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from None


def _tensors(data: mmap.mmap, at: int, alignment: int, path: Path) -> dict[str, Stored]:
    (count,) = struct.unpack_from("<Q", data, 8)
    found = {}
    for _ in range(count):
        name, at = _string(data, at)
        (dims,) = struct.unpack_from("<I", data, at)
        if dims > MOST_DIMENSIONS:
            raise ValueError(name)
        *shape, kind, start = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
        at += 4 + 8 * dims + 12
        if kind not in SIZES:
            raise ModelError(
                f"{path} stores {name} in GGUF's type {kind}, which coattn does not know.",
                "Choose a file of another quantisation, such as Q4_K_M.",
            )
        block, size = SIZES[kind]
        if not shape or shape[0] % block:
            raise ValueError(name)
        found[name] = Stored(kind, tuple(reversed(shape)), start, math.prod(shape) // block * size)
    begin = -(-at // alignment) * alignment
    found = {name: each._replace(start=begin + each.start) for name, each in found.items()}
    if any(each.start + each.size > len(data) for each in found.values()):
        raise ValueError(len(data))
    return found


def _metadata(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], int]:
    """Also where it ends."""
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
    return found, at


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
        form = f"<{NUMBERS[kind]}"
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    kind, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind not in (STRING, ARRAY):
        form = f"<{length}{NUMBERS[kind]}"
        return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    found = []
    for _ in range(length):
        value, at = _value(data, at, kind)
        found.append(value)
    return found, at
