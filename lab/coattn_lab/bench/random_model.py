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
    """A model's config, with room for more positions than it was trained on, and no word of how weights are quantised.
    Raises ModelError for an unknown name."""
    config = SHAPES[shapes] if shapes in SHAPES else find_config(shapes)[1]
    config = config.get("text_config", config)
    learned = config["model_type"] == "opt"  # its positions are weights
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return {**plain, "max_position_embeddings": 1 << (16 if learned else 20)}


def random_model(shapes: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model in these shapes, weights drawn on the device. Raises BudgetError where its memory has no room."""
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
    return make(device).to(device).eval()
