"""Which model an engine runs, where its weights lie, and how long its sequences may be."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coattn.errors import ConfigError
from coattn.hf.architectures import check_family
from coattn.hf.families import check_length
from coattn.hf.load import Loaded, choose_device, load
from coattn.hf.weights import StagedWeights
from coattn.method.row import Composed
from coattn.part import MOST, check_number
from coattn.progress import progress_line

UNKNOWN_POSITIONS = 8192
"""Tokens of a sequence where neither the caller nor the model says."""

log = logging.getLogger("coattn")


def open_model(
    model: Any,
    dtype: str | torch.dtype,
    device: str | torch.device,
    on_host: bool,
    first: torch.device | None,
    tokens: int | None,
    progress: bool,
) -> Loaded:
    """on_host: the weights stay there, and the caller moves them. first: of several devices. tokens: of a sequence."""
    if isinstance(model, str | Path):
        place = device if first is None else first
        fits = partial(check_length, "max_length", tokens, str(model))
        with progress_line(f"{Path(model).name}: ", progress) as show:
            return load(model, dtype=dtype, device=place, on_host=on_host, on_progress=show, check=lambda _, n: fits(n))
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
    """The longest sequence: what was asked for, checked against the model's positions; else all of these."""
    most = loaded.positions
    if wanted is None:
        return most or UNKNOWN_POSITIONS
    check_length("max_length", wanted, loaded.name, most)
    return wanted


def check_share(weights_on_gpu: float | None, composed: Composed | None) -> float | None:
    """The share of the layers' weights on the GPU, where some lie elsewhere. composed: None where it is chosen later.

    Raises ConfigError for what is no share, and for methods that need the next layer's weights early.
    """
    if weights_on_gpu is None:
        return None
    check_number("weights_on_gpu", weights_on_gpu, 0, 1)
    if composed is None:  # what may be chosen predicts no queries
        return weights_on_gpu
    if composed.build().schedule.predicts(MOST):
        raise ConfigError(
            f"weights_on_gpu is given, but method {composed.method.name!r} makes a layer's query one layer ahead, when "
            "its weights may not be on the GPU yet.",
            "Leave it out, or use a method such as cpu, offload or hgca.",
        )
    return weights_on_gpu


def stage(loaded: Loaded, share: float, device: str | torch.device) -> StagedWeights | None:
    """Moves the model's weights. None without a GPU, and says so. The caller closes it."""
    home = loaded.model.get_input_embeddings().weight.device
    place = home if home.type == "cuda" else choose_device(device)
    if place.type != "cuda":
        log.warning("weights_on_gpu has no effect without a GPU.")
        return None
    if getattr(loaded.model, "hf_device_map", None):
        raise ConfigError(
            "weights_on_gpu is given, but the model was loaded with a device_map, which says where weights lie.",
            "Leave one of them out.",
        )
    made = StagedWeights(loaded.model, share, place)
    torch.cuda.empty_cache()  # what left the GPU is free for the KV
    return made
