"""Models with random weights in the shapes of known ones: for benchmarks, where no weights are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coattn.cache import available
from coattn.errors import BudgetError, ConfigError
from coattn.hf.quiet import quiet
from coattn.hf.stored import stored
from coattn.units import format_apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "word_embed_proj_dim": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 1 << 16,
        "tie_word_embeddings": True,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "rotary_pct": 0.25,
        "vocab_size": 50432,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
    },
}
"""Name -> config, as their model cards give it, with room for more positions than they were trained on."""


def heads_of(shapes: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of shapes by name."""
    found = _shapes(shapes)
    heads = found["num_attention_heads"]
    return heads, found.get("num_key_value_heads", heads), found.get("head_dim") or found["hidden_size"] // heads


def _shapes(shapes: str) -> dict[str, Any]:
    if shapes not in SHAPES:
        raise ConfigError(f"There are no shapes {shapes!r}.", f"There are: {', '.join(SHAPES)}.")
    return SHAPES[shapes]


def random_model(shapes: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model in these shapes, weights drawn on the device. Raises BudgetError where DRAM has no room for it."""
    config = AutoConfig.for_model(**_shapes(shapes))

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


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a decode step must read: all but the rows of the embedding it does not look up."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    total = sum(weight.nbytes for _, weight in stored(model))
    return int(total if table is getattr(head, "weight", None) else total - table.nbytes)
