"""Models with random weights in the shapes of known ones: for benchmarks, where no weights are needed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coattn.cache import available
from coattn.errors import BudgetError, ConfigError
from coattn.hf.refusals import quiet
from coattn.units import format_apart


def _shape(
    family: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """A config. inner: the width of the MLP. more: further keys, or values in place of these."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _shape("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "llama-3-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, rms_norm_eps=1e-5),
    "llama-2-7b": _shape("llama", 4096, 11008, 32, 32, 32, 32000, rms_norm_eps=1e-5),
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "word_embed_proj_dim": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 1 << 16,
    },
    "gpt-neox-20b": _shape("gpt_neox", 6144, 24576, 44, 64, 64, 50432, rotary_pct=0.25),
    "smollm2-135m": _shape("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "tiny": _shape("llama", 64, 128, 2, 4, 2, 256, tie_word_embeddings=True),
}
"""Name -> config, as their model cards give it, with room for more positions than they were trained on."""


def random_model(shapes: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal model in these shapes, weights drawn on the device. Raises BudgetError where DRAM has no room for it."""
    if shapes not in SHAPES:
        raise ConfigError(f"There are no shapes {shapes!r}.", f"There are: {', '.join(SHAPES)}.")
    config = AutoConfig.for_model(**SHAPES[shapes])

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
