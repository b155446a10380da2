"""Where an engine's weights lie, if some of them are to lie in DRAM."""

from __future__ import annotations

import logging

import torch

from coattn.errors import ConfigError
from coattn.hf.load import Loaded, choose_device
from coattn.hf.weights import StagedWeights
from coattn.method.row import Composed
from coattn.part import MOST, check_number

log = logging.getLogger("coattn")


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
