"""Which model an engine runs, and how long its sequences may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coattn.errors import ConfigError
from coattn.hf.architectures import check_family
from coattn.hf.forward import longest
from coattn.hf.load import Loaded, load
from coattn.part import check_count

DEFAULT_MAX_TOKENS = 8192
"""max_length when neither the caller nor the model asks for less."""


def open_model(
    model: Any, dtype: str | torch.dtype, device: str | torch.device, on_host: bool, first: torch.device | None
) -> Loaded:
    """on_host: the weights stay there, and the caller moves them. first: of several devices."""
    if isinstance(model, str | Path):
        return load(model, dtype=dtype, device=device if first is None else first, on_host=on_host)
    for name, value in (("dtype", dtype), ("device", device)):
        if value != "auto":
            raise ConfigError(f"{name} was given with a model that is loaded already.", f"Leave {name} out.")
    if isinstance(model, Loaded):
        check_family(model.model)
        return model
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], torch.nn.Module):
        module: Any = model[0]
        check_family(module)
        return Loaded(module, model[1], getattr(module, "name_or_path", "") or type(module).__name__, None)
    raise ConfigError(
        f"The model is a {type(model).__name__}.", "Give a name, a folder, a Loaded, or (model, tokenizer)."
    )


def sequence_length(loaded: Loaded, wanted: int | None) -> int:
    """The longest sequence: what was asked for, checked against the model's positions."""
    most = longest(loaded.model)
    if wanted is None:
        return DEFAULT_MAX_TOKENS if most is None else min(most, DEFAULT_MAX_TOKENS)
    check_count("max_length", wanted, 2)
    if most is not None and wanted > most:
        raise ConfigError(
            f"max_length is {wanted:,}, but {loaded.name} has {most:,} positions that a batch can use.",
            f"Set max_length={most} or less.",
        )
    return wanted
