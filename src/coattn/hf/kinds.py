"""What Transformers makes of a config.json: its dimensions, and how each kind of its layers would run here."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coattn.errors import UnsupportedError
from coattn.hf.ahead import Ahead
from coattn.hf.architectures import attention_layers, attention_modules
from coattn.hf.experts import COPYING, expert_modules, implemented, top_of
from coattn.hf.families import language_part
from coattn.hf.fuse.experts import expert_form
from coattn.hf.fuse.layer import layer_forms
from coattn.hf.fuse.siblings import find_siblings
from coattn.hf.gguf.blocks import READERS
from coattn.hf.gguf.header import read_tensors
from coattn.hf.gguf.read import config_of as of_file
from coattn.hf.load import choose_dtype
from coattn.hf.probe import look_at, mixers_of, routed_to
from coattn.hf.quantised.config import describe, is_packed, quantisation
from coattn.hf.refusals import explained
from coattn.hf.waits import waits
from coattn.units import format_bytes


def config_of(gguf: Path) -> dict[str, Any]:
    """The config.json that a GGUF file becomes, with the types and the bytes of its weights as they are kept."""
    config, tensors = of_file(gguf), read_tensors(gguf)
    matrices = {name: each for name, each in tensors.items() if len(each.shape) > 1}
    sizes = {name: x.size if x.kind in READERS else 2 * math.prod(x.shape) for name, x in matrices.items()}
    table = "token_embd.weight"
    kept = {
        "quant_method": "gguf",
        "types": sorted({READERS[x.kind][0] for x in matrices.values() if x.kind in READERS}),
        "weight_bytes": sum(sizes.values()),
        "unread_bytes": 0 if config.tie_word_embeddings else sizes.get(table, 0),
    }
    return {**config.to_dict(), "quantization_config": kept}


def with_defaults(name: str, config: Mapping[str, Any], needed: Sequence[str]) -> dict[str, Any]:
    """What a config leaves out is its family's default, which a line says of what is needed; its dimensions have their
    usual names, too."""
    with explained(name, "config"):
        known = AutoConfig.for_model(**config)
    unsaid = ", ".join(key for key in needed if key not in config and known.attribute_map.get(key) not in config)
    if unsaid:
        said = "The config of %s does not say %s: Transformers' defaults of its family are taken."
        logging.getLogger("coattn").warning(said, name, unsaid)
    return {**known.to_dict(), **{key: getattr(known, key) for key in known.attribute_map if hasattr(known, key)}}


def look_at_config(
    name: str, config: Mapping[str, Any], item_bytes: int
) -> tuple[tuple[tuple[int | None, ...], int], tuple[int, int]]:
    """Of a model with states: the windows of the layers that attend and the bytes of a sequence's states; the weights
    beside experts, and those of experts. By a model without memory."""
    model = _without_memory(name, {**config, "dtype": "bfloat16" if item_bytes == 2 else "float32"})
    states = sum(
        math.prod(shape) * (item_bytes if dtype is None else dtype.itemsize)
        for mixer in mixers_of(model)
        for _, _, shape, dtype in mixer.states
    )
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    weights = [(key, x.numel()) for key, x in model.named_parameters() if id(x) not in tables]
    body, experts = sum(n for _, n in weights), sum(n for key, n in weights if ".experts." in key)
    return (tuple(x.sliding_window for x in look_at(model)), states), (body - experts, experts)


def _without_memory(name: str, config: Mapping[str, Any]) -> Any:
    with explained(name, "config"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()


def layer_kinds(name: str, config: Mapping[str, Any], device: torch.device) -> list[dict[str, str]]:
    """Of each kind of layer who attends in a decode step and whether the step is captured and fused; whether queries
    are predicted, tried with random weights. Takes a second or so, and the memory of one attention module.

    Raises UnsupportedError for attention that coattn cannot compute.
    """
    text, on_gpu = language_part(config), device.type == "cuda"
    plain = is_packed(config) or not quantisation(config)
    text.pop("quantization_config", None)
    model = _without_memory(name, text)
    siblings = {module: found for module in model.modules() if (found := find_siblings(module))}
    layers = [
        (
            x.sliding_window,
            x.q_heads,
            x.kv_heads,
            x.head_dim,
            x.sinks,
            plain and any(True for _ in layer_forms(layer, siblings)),
        )
        for x, layer in zip(look_at(model), attention_layers(model), strict=True)
    ]
    kinds, late = Counter(layers), _waits(model)
    how = "captured" if on_gpu and late is None else "layer by layer"
    kernel, rows = import_module(f"coattn.kernels.{'triton' if on_gpu else 'native'}.attend"), []
    for (window, heads, on, size, sinks, fused), count in kinds.items():
        q = torch.empty(1, 1, heads, size, dtype=choose_dtype("auto", device), device=device)
        why = kernel.refuses(q, q.new_empty(1, on, 2, 64, size))
        choice = ["reference" if why else "Triton" if on_gpu else "C++ kernels", *["fused"] * (fused and on_gpu)]
        rows.append({
            "part": f"{count} layers over {'all tokens' if window is None else f'the last {window:,} tokens'}",
            "choice": ", ".join([*choice, how]),
            "reason": why or f"{heads} query heads on {on}, each of {size} numbers{' and a sink' if sinks else ''}",
        })  # fmt: skip
    top = top_of(model)
    for (experts, own), count in Counter(map(_mixture, expert_modules(model))).items():
        packed = is_packed(config)
        fast, name = plain and (own or packed) and on_gpu, model.config._experts_implementation
        name = "unpacking one after the other" if packed else name
        rows.append({
            "part": f"{count} layers of {experts} experts, of which a token uses {top}",
            "choice": f"{'Triton' if fast else name}, {how}",
            "reason": late or (f"prompts by {name}; only experts in use are read" if fast else "Transformers' own"),
        })  # fmt: skip
    mixers = mixers_of(model)
    if mixers:
        size = sum(math.prod(shape) * (4 if dtype else 2) for each in mixers for _, _, shape, dtype in each.states)
        modules = [model.get_decoder().get_submodule(each.name) for each in mixers]
        ours = plain and on_gpu and all(len(each.members) == 4 for x in modules for each in siblings.get(x, ()))
        ours = ours and all(x in siblings for x in modules)
        said = f"Transformers' own modules{', decode steps in three kernels' * ours}"
        said += f"; {format_bytes(size)} a sequence in bfloat16, twice"
        rows.append({"part": f"{len(mixers)} layers with a state", "choice": "as the others", "reason": said})
    ahead = {"part": "queries a layer ahead", "choice": "predicted", "reason": "`scout` and `infinigen` need them"}
    try:
        Ahead(_with_numbers(model), [layers.index(kind) for kind in kinds])
    except UnsupportedError as error:
        ahead |= {"choice": "not predicted", "reason": error.sentence}
    if is_packed(config):
        rows.append(_packed(config, on_gpu))
    return [*rows, ahead]


def _mixture(module: Any) -> tuple[int, bool]:
    """How many experts there are, and whether their kernels over a few tokens are ours."""
    return len(module.down_proj), expert_form(module) is not None


def _waits(model: Any) -> str | None:
    """Why steps of a model without weights would not be captured."""
    decoder = model.get_decoder()
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    copying = implemented(expert_modules(model), COPYING)
    with routed_to(decoder.config, lambda _, q, *__, **___: (q.transpose(1, 2), None)), torch.device("meta"), copying:
        return waits(lambda: decoder(input_ids=ids, attention_mask=ids + 1, position_ids=ids, use_cache=False))


def _with_numbers(model: Any) -> Any:
    """The model with random weights in its attention modules, the same in all layers, and with its own rotation."""
    rotary, of_shape = getattr(model.get_decoder(), "rotary_emb", None), dict[torch.Size, torch.nn.Parameter]()
    if rotary is not None:
        model.get_decoder().rotary_emb = type(rotary)(rotary.config)
    for each in (part for module in attention_modules(model) for part in module.modules()):
        for name, weight in each._parameters.items():
            if weight is not None and weight.shape not in of_shape:
                numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
                of_shape[weight.shape] = torch.nn.Parameter(numbers, requires_grad=False)
            each._parameters[name] = weight if weight is None else of_shape[weight.shape]
    return model


def _packed(config: Mapping[str, Any], on_gpu: bool) -> dict[str, str]:
    form, scales = describe(config)
    if not on_gpu and quantisation(config)["quant_method"] == "gguf":
        why = "a CPU multiplies numbers faster; they stay packed where memory is short"
        return {"part": "weights of linear layers", "choice": f"{form}, unpacked", "reason": why}
    how = "decode steps multiply them as they are; of prompts" if on_gpu else "multiplied by parts:"
    why = f"{quantisation(config)['quant_method']}, a scale for {scales}; {how} one matrix at a time is unpacked"
    return {"part": "weights of linear layers", "choice": f"{form}, kept packed", "reason": why}
