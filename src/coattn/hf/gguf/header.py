"""A GGUF file by what it says about itself: its metadata, without its weights. Half a second for large vocabularies."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.errors import ModelError
from coattn.hf.converted import Progress, sha256_of, silent, stage

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of numbers, by `struct`'s letters."""


ARCHITECTURES = ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""What both Transformers reads from GGUF and coattn runs."""


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
    again = "Copy or download the file again."
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise ModelError(f"{path} is not a GGUF file.", "Give a GGUF file, a model folder or a name.")
            return _metadata(data, path)
    except (ValueError, struct.error, UnicodeDecodeError, LookupError, OverflowError, MemoryError):
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
