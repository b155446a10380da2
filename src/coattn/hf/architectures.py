"""What a model's modules and config say about attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel as PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.families import refuse_family
from coattn.hf.stored import COMPUTED, first_of, is_plain
from coattn.kernels.card import check_card
from coattn.types import LayerShape, Rope

INTERLEAVED = ("glm", "glm4")
"""Families in which RoPE turns pairs of neighbouring channels."""
PROJECTIONS = ("q_proj", "qkv_proj", "query_key_value")
"""What makes queries in an attention module, by name."""


def check_family(model: PreTrainedModel) -> None:
    """Raises UnsupportedError naming the family or the option that coattn does not run."""
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"coattn runs models of Transformers, not {model!r}.",
            "Load it first: AutoModelForCausalLM.from_pretrained(...). `coattn.LLM` takes names.",
        )
    refused = refuse_family(model.config.to_dict())
    if refused is not None:
        raise refused
    check_inference(model)
    if not hasattr(model, "generate") or model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{type(model).__name__} is not a causal language model.", "Load it with AutoModelForCausalLM."
        )
    if getattr(model.config, "is_causal", True) is False:
        raise UnsupportedError("The model's config sets is_causal to false.", "Use a causal model.")


def check_inference(model: PreTrainedModel) -> None:
    """Raises UnsupportedError for a model in training mode."""
    if model.training:
        raise UnsupportedError(
            "The model is in training mode, and coattn is for inference.", "Call model.eval() first."
        )


def attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention module of each layer, in order."""
    found = {}
    for module in model.get_decoder().modules():
        # attention modules are those that know their layer and have a projection; decoder layers may know it as well
        if hasattr(module, "layer_idx") and hasattr(module, "config") and any(hasattr(module, n) for n in PROJECTIONS):
            found[int(module.layer_idx)] = module
    layers = int(model.config.num_hidden_layers)
    if sorted(found) != list(range(layers)):
        raise UnsupportedError(
            f"{type(model).__name__} has {layers} layers, but attention was found in {len(found)} of them.",
            "Models that mix attention with other layers are not supported.",
        )
    return [found[i] for i in range(layers)]


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers, in order: those that the attention modules belong to."""
    parents = {child: layer for layer in model.get_decoder().modules() for child in layer.children()}
    return [parents[module] for module in attention_modules(model)]


def describe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Shape, window, soft-cap, dtype and device of each layer's attention."""
    config = model.config
    q_heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or q_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // q_heads)
    softcap = getattr(config, "attn_logit_softcapping", None)
    embeddings, dtype = model.get_input_embeddings(), activation_dtype(model)
    shapes = []
    for i, module in enumerate(attention_modules(model)):
        weight = first_of(module)
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is None:
            device = embeddings.weight.device if weight is None else weight.device
        check_card(torch.device(device))
        shapes.append(
            LayerShape(
                q_heads,
                kv_heads,
                head_dim,
                dtype,
                torch.device(device),
                _sliding_window(config, i),
                float(softcap) if softcap is not None else None,
                None if weight is None else _mark(weight),
                _rope(model, i),
            )
        )
    return shapes


def activation_dtype(model: PreTrainedModel) -> torch.dtype:
    """In which the model computes keys and values: that of its embeddings, however its other weights are stored."""
    for dtype in (model.get_input_embeddings().weight.dtype, getattr(model.config, "dtype", None)):
        if isinstance(dtype, torch.dtype) and dtype in COMPUTED:
            return dtype
    raise UnsupportedError(
        "The embeddings are quantised, and the model's config does not say in which dtype it computes.",
        "Set model.config.dtype, for example to torch.bfloat16.",
    )


def _rope(model: PreTrainedModel, layer: int) -> Rope | None:
    """How a layer turns its keys; None: it does not, or its weights are nowhere."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    kind, how = "", rotary.rope_type
    if isinstance(how, dict):  # each kind of layer its own (Gemma 3)
        kind = model.config.layer_types[layer] + "_"
        how = how[kind[:-1]]
    frequencies: torch.Tensor = getattr(rotary, f"{kind}inv_freq")
    if frequencies.is_meta:
        return None
    fixed = () if how in ("dynamic", "longrope") else tuple(frequencies.tolist())
    return Rope(fixed, interleaved=model.config.model_type in INTERLEAVED)


def _mark(weight: torch.Tensor) -> float | None:
    """The norm of a few thousand weights, which rounding to another dtype hardly changes; None of quantised ones."""
    if weight.is_meta or not is_plain(weight):
        return None
    weight = getattr(weight, "on_host", weight)  # of a layer whose turn on the GPU may not have come
    return float(weight.detach().flatten()[:4096].float().norm())


def _sliding_window(config: Any, layer: int) -> int | None:
    """Tokens that a layer looks back, itself included, or None."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return None if window is None else int(window)
