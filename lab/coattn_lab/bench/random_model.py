"""Models with random weights in the shapes of known ones: for benchmarks, where no weights are needed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coattn.cache import available
from coattn.errors import BudgetError
from coattn.hf.quantised.module import PackedLinear
from coattn.hf.refusals import quiet
from coattn.kernels.quantise.weights import pack
from coattn.tools.plan.known import find_config
from coattn.units import format_apart

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
}
"""Name -> config, besides the models that `coattn plan` knows by name."""
GROUP = 128
"""Columns of packed weights that share a scale, and in 4 bits a zero; fewer where a layer has not a multiple."""


def config_of(shapes: str) -> dict[str, Any]:
    """A model's config, with room for more positions than it was trained on, and no word of how weights are quantised.
    Raises ModelError for an unknown name."""
    shapes = shapes.partition(":")[0]
    config = SHAPES[shapes] if shapes in SHAPES else find_config(shapes)[1]
    config = config.get("text_config", config)
    learned = config["model_type"] == "opt"  # its positions are weights
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return {**plain, "max_position_embeddings": 1 << (16 if learned else 20)}


def random_model(shapes: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model in these shapes, weights drawn on the device. Raises BudgetError where its memory has no
    room.

    shapes: a name, and after a colon the form in which the layers' weights are packed: `qwen3-32b:int4`.
    """
    config = AutoConfig.for_model(**config_of(shapes))

    def make(place: torch.device) -> PreTrainedModel:
        with quiet(), place:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model

    # without a GPU the system would promise the memory, and end the process when it is written to
    free = {"cpu": lambda: available.memory()[1], "cuda": lambda: torch.cuda.mem_get_info(device)[0]}.get(device.type)
    need = sum(p.nbytes for p in make(torch.device("meta")).parameters()) if free else 0
    if free and need > (left := free()):
        needed, has = format_apart(need, left)
        raise BudgetError(
            f"The weights of {shapes} in {str(dtype).removeprefix('torch.')} need {needed} of memory, but only "
            f"{has} is free on {'this machine' if device.type == 'cpu' else device}.",
            "Take smaller shapes, or free memory.",
        )
    model = make(device).to(device).eval()
    form = shapes.partition(":")[2]
    if form:
        _pack_layers(model.get_decoder(), form)
    return model


def _pack_layers(decoder: nn.Module, form: str) -> None:
    """Every linear layer gets random codes, of about the spread that weights begin with."""
    mask, spread = {"int4": (0x0F, 4.6), "int8": (0xFF, 74.0), "fp8": (0xBF, 0.6)}[form]  # of FP8, numbers below 2
    for name, module in [*decoder.named_modules()]:
        if type(module) is nn.Linear:
            n, k = module.weight.shape
            codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device=module.weight.device).bitwise_and_(mask)
            group = math.gcd(GROUP, k)
            scales = torch.full((k // group, n), 0.02 / spread, device=codes.device).half()
            zeros = torch.full(scales.shape, 8, dtype=torch.int8, device=codes.device) if form == "int4" else None
            weight = pack(codes.view(torch.int8) if form == "int8" else codes, scales, zeros, form, group)
            parent, _, own = name.rpartition(".")
            setattr(decoder.get_submodule(parent), own, PackedLinear(weight, module.bias))
