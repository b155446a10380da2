"""Load a causal language model and its tokenizer by name: quickly, quietly, from safetensors only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coattn.cache.available import memory
from coattn.errors import BudgetError, ConfigError
from coattn.hf.converted import Progress, silent, stage
from coattn.hf.cpu_dtypes import bfloat16_is_faster
from coattn.hf.families import PLAIN, check_config, language_part, positions
from coattn.hf.models import resolve
from coattn.hf.models.resolve import is_gguf
from coattn.hf.quantised.config import is_packed
from coattn.hf.refusals import explained, reachable, refuse_gaps
from coattn.hf.stored import bytes_of
from coattn.kernels.card import check_card
from coattn.units import format_apart

_causal: Any = AutoModelForCausalLM  # its annotations leave out what output_loading_info returns

Check = Callable[[Any, int | None], object]
"""Called with a tokenizer (None: not known yet) and the number of positions (None: no limit)."""

TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""The tokenizer's own name of a warning it gives once, and not when told that it was given."""

WEIGHT_FILES = ["model*.safetensors*", "*.json"]
"""What of a quantised checkpoint on the hub is fetched."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode with its tokenizer. `path` is its folder or file, or None when it came from the hub.

    A model from a GGUF file is named by what the file calls it and the file's hash; `sha256` is the whole hash.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path | None
    sha256: str | None = None

    @property
    def positions(self) -> int | None:
        """The longest sequence; None: no limit."""
        return positions(self.model.config)


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    on_host: bool = False,
    on_progress: Progress = silent,
    check: Check | None = None,
) -> Loaded:
    """The model `name` (catalog name, local folder, GGUF file or hub name), ready to generate with.

    `on_host` leaves the weights in DRAM, in the dtype that the device would have, for whoever moves only some of them.
    The tokenizer pads on the left, as generation from a batch needs, with the end token where the model names no pad
    token. Prints nothing. A model with missing or misshapen weights is refused: Transformers would fill them with
    random numbers. Code that ships with a model is never run. check: asked before any weight is fetched or read; may
    raise.
    """
    place = choose_device(device)
    number = choose_dtype(dtype, place)
    where = resolve(name, on_progress=on_progress)
    if isinstance(where, Path) and is_gguf(where):
        return _read_gguf(where, number, place, on_host, on_progress, check)
    with explained(where, "config"):
        options = hub_options(where)
        config = AutoConfig.from_pretrained(where, **options)
        check_config(config.to_dict())  # before any weight is fetched
    with explained(where, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(where, config=config, **options)
    config, names = _text_part(config)
    if check is not None:
        check(tokenizer, positions(config))
    if is_packed(config.to_dict()):
        model = _read_packed(where, str(name), config, number, names, place, on_host, on_progress)
    else:
        if not hasattr(config, "quantization_config"):
            with torch.device("meta"):
                like = AutoModelForCausalLM.from_config(config, dtype=number)
            _check_memory(like, str(number).removeprefix("torch."), None if on_host else place, str(name))
        with explained(where, "model"), stage("load", on_progress):
            model, report = _causal.from_pretrained(
                where,
                config=config,
                dtype=number,
                use_safetensors=True,
                output_loading_info=True,
                key_mapping=names,
                **options,
            )
            if not on_host:
                model.to(place)
        refuse_gaps(str(name), sorted(report["missing_keys"]), sorted(key[0] for key in report["mismatched_keys"]))
    return _loaded(model, tokenizer, str(name), where if isinstance(where, Path) else None)


def _loaded(model: PreTrainedModel, tokenizer: Any, name: str, path: Path | None, sha256: str | None = None) -> Loaded:
    model.eval()
    tokenizer.padding_side = "left"
    # Whether a text is too long is for the caller to say, who may well cut it into pieces.
    tokenizer.deprecation_warnings[TOO_LONG] = True
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Loaded(model, tokenizer, name, path, sha256)


def _read_gguf(
    path: Path,
    dtype: torch.dtype,
    place: torch.device,
    on_host: bool,
    on_progress: Progress,
    check: Check | None,
) -> Loaded:
    """A GGUF file, whose weights stay in its own bits where that is faster, or memory is short."""
    from coattn.hf.gguf.convert import name_ends
    from coattn.hf.gguf.header import open_gguf
    from coattn.hf.gguf.read import GgufCheckpoint, config_of
    from coattn.hf.gguf.tokenizer import read_tokenizer

    file = open_gguf(path, on_progress)
    if check is not None:
        check(None, file.header.get(f"{file.header['general.architecture']}.context_length"))
    config = config_of(path)
    with explained(path, "tokenizer"):
        tokenizer = read_tokenizer(file.header, path)
    if check is not None:
        check(tokenizer, positions(config))
    with explained(path, "model"), stage("load", on_progress):
        checkpoint = GgufCheckpoint(file, config, dtype, keeps_packed(place, on_host))
        if bytes_of(checkpoint.model) > memory()[1]:
            checkpoint = GgufCheckpoint(file, config, dtype)
        _check_memory(checkpoint.model, "their own bits", None if on_host else place, file.name)
        model = checkpoint.fill(torch.device("cpu") if on_host else place)
        name_ends(model, tokenizer, file.header)
        model.config.name_or_path = file.name
    return _loaded(model, tokenizer, file.name, path, file.sha256)


def _text_part(config: Any) -> tuple[Any, dict[str, str] | None]:
    """Of a checkpoint that also takes images: the config of its language model, and how its weights are named there."""
    text = getattr(config, "text_config", None)
    if text is None:
        return config, None
    if text.model_type in PLAIN:
        text = AutoConfig.for_model(**language_part(text.to_dict()))
    text.tie_word_embeddings = config.tie_word_embeddings
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    part = r"^(?:model\.)?(?:language_model|text_model)\."
    return text, {rf"{part}lm_head\.": "lm_head.", rf"{part}(?:model\.)?(?!lm_head)": "model."}


def keeps_packed(place: torch.device, on_host: bool) -> bool:
    """Whether weights of GGUF files stay packed for a device: a CPU multiplies numbers tens of times faster."""
    return on_host or place.type != "cpu"


def _read_packed(
    where: Path | str,
    name: str,
    config: Any,
    dtype: torch.dtype,
    renamed: dict[str, str] | None,
    place: torch.device,
    on_host: bool,
    on_progress: Progress,
) -> PreTrainedModel:
    """A model whose weights stay in 4 or 8 bits."""
    from coattn.hf.quantised.read import Checkpoint

    with explained(where, "model"), stage("load", on_progress):
        local = hub_options(where)["local_files_only"]
        folder = (
            where
            if isinstance(where, Path)
            else Path(snapshot_download(where, local_files_only=local, allow_patterns=WEIGHT_FILES))
        )
        checkpoint = Checkpoint(folder, name, config, dtype, renamed)
        _check_memory(checkpoint.model, "4 or 8 bits", None if on_host else place, name)
        return checkpoint.fill(torch.device("cpu") if on_host else place)


def _check_memory(model: PreTrainedModel, form: str, place: torch.device | None, name: str) -> None:
    """Raises BudgetError where weights do not fit. model: without memory. place: None: they stay in DRAM."""
    need = bytes_of(model)
    free, of, where = memory()[1], "memory", "this machine"
    hint = "Take a smaller model, or free memory."
    if place is not None and place.type == "cuda":
        free, of, where = torch.cuda.mem_get_info(place)[0], "GPU memory", str(place)
        hint = "Keep a part of them in DRAM (weights_on_gpu), take several devices, or a smaller model."
    if need > free:
        needed, there = format_apart(need, free)
        said = f"The weights of {name} in {form} need {needed} of {of}"
        raise BudgetError(f"{said}, but only {there} is free on {where}.", hint)


def choose_device(device: str | torch.device) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{device!r} is not a device.", "Give auto, cpu, cuda or cuda:N.") from None
    if place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise ConfigError(f"coattn does not run on the device {device}.", "Give auto, cpu, cuda or cuda:N.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"There is no device {place} on this machine.", "Give auto or cpu; see `coattn doctor`.")
    check_card(place)
    return place


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, and on a CPU that has AMX; else float32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" or bfloat16_is_faster() else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not a dtype.", f"Give auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def hub_options(where: Path | str) -> dict[str, Any]:
    """Of every call that loads: no code of the model's own, and no hub that does not answer."""
    return {"trust_remote_code": False, "local_files_only": isinstance(where, Path) or not reachable(where)}
