"""What a model's modules and config say about attention."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel as PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.families import note_family, refuse_family
from coattn.hf.probe import look_at, mixers_of
from coattn.hf.stored import COMPUTED, first_of, is_plain
from coattn.kernels.card import check_card
from coattn.types import LayerShape, Rope, StateShape

INTERLEAVED = ("glm", "glm4")
"""Families in which RoPE turns pairs of neighbouring channels."""
TURNED = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt"),
    *("qwen3_moe", "glm4_moe", "mixtral", "gpt_oss"),
    *INTERLEAVED,
)
"""Families whose queries and rotations are understood."""


def check_family(model: PreTrainedModel) -> None:
    """Raises UnsupportedError naming the family or the option that coattn does not run."""
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"coattn runs models of Transformers, not {model!r}.",
            "Load it first: AutoModelForCausalLM.from_pretrained(...). `coattn.LLM` takes names.",
        )
    if getattr(model.config, "text_config", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} also takes images or sound, and coattn runs the language model inside it alone.",
            "Give the checkpoint by its name or folder to coattn.LLM or coattn.hf.load.load, which load that part.",
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
    look_at(model)
    note_family(str(model.config.model_type))


def check_inference(model: PreTrainedModel) -> None:
    """Raises UnsupportedError for a model in training mode."""
    if model.training:
        raise UnsupportedError(
            "The model is in training mode, and coattn is for inference.", "Call model.eval() first."
        )


def attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention module of each layer, in order."""
    decoder = model.get_decoder()
    return [decoder.get_submodule(each.name) for each in look_at(model)]


def attention_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers that the attention modules belong to, in order."""
    decoder = model.get_decoder()
    return [decoder.get_submodule(each.layer) for each in look_at(model)]


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers, in order, with those that have no attention."""
    if not mixers_of(model):
        return attention_layers(model)
    listed = look_at(model)[0].layer.rpartition(".")[0]
    return list(model.get_decoder().get_submodule(listed).children())


def describe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Shape, window, soft-cap, sinks, dtype and device of each layer's attention."""
    embeddings, dtype = model.get_input_embeddings(), activation_dtype(model)
    shapes = []
    for seen, module in zip(look_at(model), attention_modules(model), strict=True):
        weight = first_of(module)
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is None:
            device = embeddings.weight.device if weight is None else weight.device
        check_card(torch.device(device))
        shapes.append(
            LayerShape(
                seen.q_heads,
                seen.kv_heads,
                seen.head_dim,
                dtype,
                torch.device(device),
                seen.sliding_window,
                seen.softcap,
                None if weight is None else _mark(weight),
                _rope(model, seen.index),
                sink_logits=None if seen.sinks is None else _sinks(module.get_parameter(seen.sinks), device),
            )
        )
    return shapes


def _sinks(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of its own: the parameter's memory may be another's when the layer's weights lie in DRAM."""
    own = getattr(parameter, "on_host", parameter).detach()
    if own.is_meta and torch.device(device).type != "meta":
        raise UnsupportedError(
            "A layer's sinks are not in memory: the model was loaded with weights on disk or without any.",
            "Load it without a device_map, or with one that keeps every layer on a GPU or on the CPU.",
        )
    return own.to(device, torch.float32, copy=True)


def describe_states(model: PreTrainedModel) -> list[StateShape]:
    """What the layers with a state keep of a sequence; nothing where every layer attends."""
    decoder, found = model.get_decoder(), []
    for mixer in mixers_of(model):
        weight = first_of(decoder.get_submodule(mixer.name))
        device = (model.get_input_embeddings().weight if weight is None else weight).device
        for kind, number, shape, dtype in mixer.states:
            name = f"{mixer.index}.{kind}.{number}"
            found.append(StateShape(name, shape, dtype or activation_dtype(model), torch.device(device)))
    return found


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
    if model.config.model_type not in TURNED:
        return Rope(())
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
