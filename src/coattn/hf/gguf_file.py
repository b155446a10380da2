"""A GGUF file that a user has, as a model: converted once for each dtype, then loaded like any model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from coattn.errors import ModelError
from coattn.hf.gguf import finished
from coattn.hf.gguf_tokenizer import read_tokenizer
from coattn.hf.models import cache, manifest
from coattn.hf.models.gguf_header import read_header
from coattn.hf.models.hashing import sha256_of
from coattn.hf.models.progress import Progress, silent
from coattn.hf.quiet import quiet
from coattn.hf.refusals import one_line

untyped: Any = transformers  # parts of it carry no annotations

ARCHITECTURES = ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""What both Transformers reads from GGUF and coattn runs."""


@dataclass(frozen=True)
class GgufFile:
    """A file, by what is in it. name: its model's own name and the first digits of the hash."""

    path: Path
    name: str
    sha256: str
    header: dict[str, Any]

    @property
    def requirement(self) -> str:
        """What a converted folder says it was made from."""
        return self.name

    @property
    def gguf_sha256(self) -> str:
        return self.sha256


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
    sha256 = sha256_of(path, on_progress=on_progress)
    said = str(header.get("general.name") or path.stem)
    name = "-".join("".join(c if c.isalnum() or c in "._-" else " " for c in said).split())
    return GgufFile(path, f"{name or 'gguf'}@{sha256[:12]}", sha256, header)


def folder_of(file: GgufFile, dtype: torch.dtype, on_progress: Progress = silent) -> Path:
    """The model folder that `file` makes, with weights in `dtype`. A minute or two the first time, then at once.

    It lies in the cache, by the file's hash. Safe to call from several processes at once.
    """
    name = f"gguf-{file.sha256[:16]}-{str(dtype).removeprefix('torch.')}"
    folder = cache.model_dir(name)
    if manifest.fault(folder, file) is None:
        return folder
    with cache.locked(name):
        if manifest.fault(folder, file) is None:
            return folder
        with cache.workspace(name) as scratch, cache.writing(scratch.parent):
            made = scratch / "model"
            made.mkdir()
            on_progress("convert", 0, 1)
            made_with = convert_file(file, made, dtype)
            manifest.write(made, file, made_with)
            on_progress("convert", 1, 1)
            return cache.publish(made, name)


def convert_file(file: GgufFile, folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """Writes config, weights in `dtype`, tokenizer and chat template to the empty `folder`. Returns the versions."""
    options: dict[str, Any] = {}
    if hasattr(untyped, "GgufConfig"):  # newer releases refuse to save a model whose blocks stay packed
        options["quantization_config"] = untyped.GgufConfig(dequantize=True)
    try:
        with quiet():
            tokenizer = read_tokenizer(file.header, file.path)
            model = AutoModelForCausalLM.from_pretrained(
                file.path.parent,
                gguf_file=file.path.name,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                **options,
            )
            positions = getattr(model.config, "max_position_embeddings", None)
            if positions:
                tokenizer.model_max_length = int(positions)
            _name_ends(model, tokenizer, file.header)
            model.config.name_or_path = file.name
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own troubles: the caller knows where it was writing
        raise ModelError(
            f"{file.path} could not be converted: {one_line(error)}.",
            f"coattn was tested with transformers 5.17 to 5.22; this is {transformers.__version__}.",
        ) from error
    return finished(folder)


def _name_ends(model: Any, tokenizer: Any, header: dict[str, Any]) -> None:
    """The file's own markers: its end token, and the one that ends a turn where that is another."""
    ends = [header.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if known:
        ids["eos_token_id"] = known[0] if len(known) == 1 else known
    model.config.update(ids)
    model.generation_config = untyped.GenerationConfig(**ids)
