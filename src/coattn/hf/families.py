"""Which checkpoints coattn runs, by their config.json alone: nothing is loaded, and PyTorch is not needed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, InputError, UnsupportedError
from coattn.hf.quantised.config import is_packed, quantisation, refuse_packed

FAMILIES: dict[str, str] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
"""`model_type` -> the family's name, of those that are tested: tiny random models give Transformers' own tokens. Others
run as far as a call of their decoder shows what coattn can attend to, and one line says that they are not tested."""

STATES = ("linear_attention", "mamba", "mamba2", "conv", "hybrid")
"""Of layers, those with a state instead of a KV cache, or beside it."""
KEYS_OF_STATES = ("mamba_", "ssm_", "linear_num_", "conv_L_")
"""How the keys of configs with such layers begin, where layer_types does not name them."""
KINDS = ("full_attention", "sliding_attention", "attention", *STATES, "moe", "mlp")
"""Of layers, those that coattn runs."""
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
REASONS = (
    (("index_n_heads", "indexer_n_heads", "index_topk"), "choose tokens by an indexer of their own"),
    (("kv_lora_rank",), "compress keys and values (MLA)"),
    (("num_kv_shared_layers",), "share keys and values between layers"),
)
"""Keys of a config, and what their models do that coattn does not run."""

WRAPPERS = (
    "gemma3",
    "mistral3",
    "llava",
    "llava_next",
    "internvl",
    "aya_vision",
    "cohere2_vision",
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
"""Families of checkpoints that also take images, whose language model is loaded alone."""

PLAIN = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Language models that differ from another family in the positions of images alone -> that family."""

LOADERS = {"torchao": "torchao", "quanto": "optimum", "hqq": "hqq"}
"""Quantisation of weights -> the package without which Transformers cannot load it."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises why a checkpoint with this config.json is not run: the first line that `plan`, `generate` and `LLM` say of
    it, before a weight is fetched or read."""
    refused = refuse_family(config) or _refuse_weights(config)
    if refused is not None:
        raise refused


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a config.json, that of its language model; where it differs from another family's by what its positions are
    in images alone, as that family's."""
    text = dict(config.get("text_config") or config)
    family = PLAIN.get(str(text.get("model_type")))
    if family is None:
        return text
    for key in ("rope_parameters", "rope_scaling"):
        rope = {k: v for k, v in (text.get(key) or {}).items() if not k.startswith("mrope_")}
        kinds = {k: "default" for k in ("type", "rope_type") if rope.get(k) == "mrope"}
        if text.get(key):
            text[key] = {**rope, **kinds}
    dropped = ("architectures", "vision_config", "text_config")
    return {**{k: v for k, v in text.items() if k not in dropped}, "model_type": family}


def positions(config: Any) -> int | None:
    """Of a model's config object: those that every sequence of a mixed batch may use; None: no limit.

    Rotary scaling that depends on the longest sequence of a call (`longrope`) would make a request's result depend on
    its neighbours, so such models end where their scaling would change.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            of_config = getattr(config, "original_max_position_embeddings", None)
            limits.append(part.get("original_max_position_embeddings") or of_config)
    return min((int(limit) for limit in limits if limit), default=None)


def check_length(what: str, tokens: int | None, name: str, most: int | None) -> None:
    """Raises ConfigError where `what`, an option or a length, is more tokens than the model has positions."""
    if tokens is not None and most is not None and tokens > most:
        hint = f"Give {most} or less, or take a model with more positions."
        raise ConfigError(f"{what} is {tokens:,}, but {name} has {most:,} positions.", hint)


def room(name: str, most: int | None, tokens: int) -> int | None:
    """Of a model's positions, those left after a prompt; None: no limit. Raises InputError when there are none."""
    if most is None:
        return None
    if tokens >= most:
        raise InputError(
            f"The prompt has {tokens:,} tokens, but {name} has only {most:,} positions.",
            "Shorten it, or use a model with a longer context.",
        )
    return most - tokens


def refuse_family(config: Mapping[str, Any]) -> UnsupportedError | None:
    """Of a model, however its weights are stored: what cannot be right. The rest is seen when its decoder is called."""
    kind, hint = (
        config.get("model_type"),
        "Choose a model of another family; docs/families.md lists those that were tested.",
    )
    inner = config.get("text_config") or {}
    if inner or kind in WRAPPERS:
        if kind in WRAPPERS:
            return refuse_family(inner)
        return UnsupportedError(
            f"Checkpoints of family {kind!r} hold a language model ({inner.get('model_type')!r}) inside one that also "
            "takes images or sound, and coattn does not know how to load it alone.",
            f"Choose a checkpoint of text alone, or of one of {', '.join(WRAPPERS)}.",
        )
    if config.get("is_encoder_decoder") or config.get("encoder_layers"):
        return UnsupportedError(f"{kind!r} is an encoder with a decoder, and coattn runs decoders alone.", hint)
    does = next((does for keys, does in REASONS if any(config.get(key) for key in keys)), None)
    if does is None and config.get("head_dim") and config.get("v_head_dim") not in (None, config["head_dim"]):
        does = "have values of another size than keys"
    if kind in STATES_ALONE:
        does = "have states and no attention"
    if does is not None:
        return UnsupportedError(f"Models of family {kind!r} {does}, which coattn does not run yet.", hint)
    for layer, attention in enumerate(config.get("layer_types") or ()):
        if attention not in KINDS:
            return UnsupportedError(
                f"Layer {layer} has attention of type {attention!r}, which is not supported.",
                "Full and sliding-window attention are.",
            )
    return None


@cache
def note_family(kind: str) -> None:
    """Logs one sentence, once, where a family has not been tested."""
    if kind not in FAMILIES:
        said = "Models of family %r have not been tested with coattn; compare a few answers with Transformers' own."
        logging.getLogger("coattn.hf").warning(said, kind)


def of_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers of a model have a state instead of a KV cache, or beside it."""
    if any(layer in STATES for layer in config.get("layer_types") or ()):
        return True
    return any(value and key.startswith(KEYS_OF_STATES) for key, value in config.items())


def _refuse_weights(config: Mapping[str, Any]) -> UnsupportedError | None:
    quantised = quantisation(config)
    if not quantised:
        return None
    method = str(quantised.get("quant_method", "unknown"))
    said, other = (
        f"The weights are quantised by {method!r}",
        "Choose the checkpoint in bfloat16 or float16, or a GGUF file.",
    )
    if is_packed(config):
        why = refuse_packed(quantised)
        return None if why is None else UnsupportedError(f"{said} with {why}, which coattn does not read.", other)
    package = LOADERS.get(method)
    if package is None:
        return UnsupportedError(f"{said}, which coattn does not load.", other)
    if find_spec(package) is None:
        return UnsupportedError(f"{said}, which takes the package {package} to load, and that is not installed.", other)
    return None
