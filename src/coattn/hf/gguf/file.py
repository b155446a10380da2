"""A GGUF file that a user has, as a model: converted once for each dtype, then loaded like any model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coattn.errors import ModelError
from coattn.hf.converted import Progress, convert_once, sha256_of, silent, stage
from coattn.hf.gguf.convert import convert
from coattn.hf.gguf.header import read_header

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


def folder_of(file: GgufFile, dtype: torch.dtype, on_progress: Progress = silent) -> Path:
    """The model folder that `file` makes, with weights in `dtype`. A minute or two the first time, then at once."""

    def fill(_scratch: Path, folder: Path) -> dict[str, str]:
        with stage("convert", on_progress):
            return convert(file.path, folder, dtype, file.name)

    name = f"gguf-{file.sha256[:16]}-{str(dtype).removeprefix('torch.')}"
    return convert_once(name, file.name, file.sha256, fill)
