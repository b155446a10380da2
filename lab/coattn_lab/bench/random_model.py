"""Models with random weights in the shapes of known ones: for benchmarks, where no weights are needed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coattn.cache import available
from coattn.errors import BudgetError
from coattn.hf.refusals import quiet
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


def config_of(shapes: str) -> dict[str, Any]:
    """A model's config, with room for more positions than it was trained on. Raises ModelError for an unknown name."""
    config = SHAPES[shapes] if shapes in SHAPES else find_config(shapes)[1]
    config = config.get("text_config", config)
    learned = config["model_type"] == "opt"  # its positions are weights
    return {**config, "max_position_embeddings": 1 << (16 if learned else 20)}


def random_model(shapes: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model in these shapes, weights drawn on the device. Raises BudgetError where DRAM has no room for it."""
    config = AutoConfig.for_model(**config_of(shapes))

    def make(place: torch.device) -> PreTrainedModel:
        with quiet(), place:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model

    if device.type == "cpu":  # the system would promise the memory, and end the process when it is written to
        need, free = sum(p.nbytes for p in make(torch.device("meta")).parameters()), available.memory()[1]
        if need > free:
            needed, left = format_apart(need, free)
            raise BudgetError(
                f"The weights of {shapes} in {str(dtype).removeprefix('torch.')} need {needed} of memory, but only "
                f"{left} is free on this machine.",
                "Take smaller shapes, or free memory.",
            )
    return make(device).to(device).eval()
