"""Turn the GGUF of a catalog model into a Transformers folder: config, safetensors, tokenizer, chat template.

Weights are stored in float16 with `float32` named in the config. The 4- and 8-bit blocks of the file have
float16 scales, so float16 keeps them almost exactly (mean KL to the unpacked float32 weights 4e-6, against
1.5e-4 if stored in bfloat16) at half the size of float32; float32 is what plain Transformers then loads, because
every machine multiplies it fast.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from coattn._version import __version__
from coattn.errors import ModelError
from coattn.hf.models.catalog import Embedded
from coattn.hf.quiet import quiet
from coattn.hf.refusals import one_line

untyped: Any = transformers  # parts of it carry no annotations

DTYPE = "float32"
"""That the config names, so that plain Transformers loads the model in it: fast on every machine; a CPU without
instructions for bfloat16 multiplies that hundreds of times slower."""
CONTROL = 3
"""GGUF's token type for tokens that are markers, never text."""


def convert(entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
    """Write the model in file `gguf` to the existing empty `folder`. Returns the versions of what made it.

    Half a minute on two cores, 0.9 GB of memory at its peak. No network, no code from the file.
    """
    try:
        with quiet():
            tokenizer = _tokenizer(entry, gguf)
            _write_weights(entry, gguf, folder, tokenizer)
            tokenizer.save_pretrained(folder)
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own troubles: the caller knows where it was writing
        raise ModelError(
            f"The GGUF file of {entry.name} could not be converted: {one_line(error)}.",
            f"coattn was tested with transformers 5.17 to 5.22; this is {transformers.__version__}.",
        ) from error
    return finished(folder)


def finished(folder: Path) -> dict[str, str]:
    """Lets others read a folder that was converted -> the versions that made it."""
    for path in folder.iterdir():
        os.chmod(path, (folder / "config.json").stat().st_mode)  # safetensors writes files only the owner can read
    packages = ("torch", "transformers", "tokenizers", "safetensors", "gguf")
    return {"coattn": __version__, **{name: version(name) for name in packages}}


def _write_weights(entry: Embedded, gguf: Path, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    options: dict[str, Any] = {}
    if hasattr(untyped, "GgufConfig"):  # newer releases refuse to save a model whose blocks stay packed
        options["quantization_config"] = untyped.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float16,
        local_files_only=True,
        trust_remote_code=False,
        **options,
    )
    _check_shape(entry, model.config)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.name_or_path = entry.title
    model.config.update(ids)
    model.generation_config = untyped.GenerationConfig(**ids)
    model.save_pretrained(folder)
    model.config.dtype = DTYPE
    model.config.save_pretrained(folder)


def _check_shape(entry: Embedded, config: Any) -> None:
    """Raise when the file contradicts the catalog: people plan their memory by the catalog."""
    found = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.max_position_embeddings,
    )
    expected = (
        entry.layers,
        entry.hidden,
        entry.query_heads,
        entry.kv_heads,
        entry.head_dim,
        entry.positions,
    )
    if found != expected:
        raise ModelError(
            f"The GGUF file of {entry.name} holds a model of shape {found}, not {expected}.",
            "Report this: it is a bug.",
        )


def _tokenizer(entry: Embedded, gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, made from the file's own vocabulary and merges.

    Transformers' reader of GGUF tokenizers loses the splitting of digits, and depending on its release takes
    another token for the end and rewrites the character U+2581 when decoding.
    """
    reader = GGUFReader(gguf)
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    types: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    begin, unknown = (
        tokens[int(reader.fields[f"tokenizer.ggml.{role}_token_id"].contents())] for role in ("bos", "unknown")
    )
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (merge.partition(" ") for merge in merges)],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    markers = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    tokenizer: PreTrainedTokenizerFast = untyped.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=entry.end_token,
        pad_token=entry.end_token,
        unk_token=unknown,
        model_max_length=entry.positions,
        clean_up_tokenization_spaces=False,
        chat_template=reader.fields["tokenizer.chat_template"].contents(),
    )
    return tokenizer
