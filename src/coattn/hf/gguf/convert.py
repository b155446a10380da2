"""A GGUF file as a Transformers folder of numbers, which the embedded model becomes: config, safetensors, tokenizer,
chat template. No code from the file runs."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from coattn._version import __version__
from coattn.errors import ModelError, one_line
from coattn.hf.gguf.header import read_header
from coattn.hf.gguf.tokenizer import read_tokenizer
from coattn.hf.refusals import quiet

untyped: Any = transformers  # parts of it carry no annotations

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf")


def convert(
    gguf: Path,
    folder: Path,
    dtype: torch.dtype,
    name: str,
    *,
    named_dtype: torch.dtype | None = None,
    end_token: str | None = None,
) -> dict[str, str]:
    """Writes the model in file `gguf` to the empty `folder`, weights in `dtype`. Returns the versions of what made it.

    named_dtype: what the config says instead of `dtype`. end_token: ends a turn and pads a batch; by default the
    file's own markers do.
    """
    options: dict[str, Any] = {}
    if hasattr(untyped, "GgufConfig"):  # newer releases refuse to save a model whose blocks stay packed
        options["quantization_config"] = untyped.GgufConfig(dequantize=True)
    try:
        header = read_header(gguf)
        with quiet():
            tokenizer = read_tokenizer(header, gguf)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                **options,
            )
            if end_token is not None:
                tokenizer.eos_token = tokenizer.pad_token = end_token
            name_ends(model, tokenizer, header if end_token is None else {})
            model.config.name_or_path = name
            model.save_pretrained(folder)
            if named_dtype is not None:
                model.config.dtype = str(named_dtype).removeprefix("torch.")
                model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:
        if isinstance(error, ModelError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # of the disk's own troubles the caller knows more: where it was writing
        raise ModelError(
            f"{gguf} could not be converted: {one_line(error)}.",
            f"coattn was tested with transformers 5.17 to 5.23; this is {transformers.__version__}.",
        ) from error
    for path in folder.iterdir():
        os.chmod(path, (folder / "config.json").stat().st_mode)  # safetensors writes files only the owner can read
    return {"coattn": __version__, **{package: version(package) for package in PACKAGES}}


def name_ends(model: Any, tokenizer: Any, header: dict[str, Any]) -> None:
    """The file's own markers: its end token, and the one that ends a turn where that is another; and the length of a
    text, which the tokenizer is told."""
    if positions := getattr(model.config, "max_position_embeddings", None):
        tokenizer.model_max_length = int(positions)
    ends = [header.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(end for end in ends if isinstance(end, int))) or [tokenizer.eos_token_id]
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if known[0] is not None:
        ids["eos_token_id"] = known[0] if len(known) == 1 else known
    model.config.update(ids)
    model.generation_config = untyped.GenerationConfig(**ids)
