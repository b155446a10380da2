"""A model as plans see it: heads, layers and bytes of weights, read out of its config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from coattn.errors import ModelError
from coattn.hf.families import of_states

DIMENSIONS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Where a config lacks one, Transformers is asked, which takes seconds to import."""
IN_4_BITS = {"awq", "gptq", "bitsandbytes", "mxfp4", "compressed-tensors", "hqq"}
"""Forms of weights with so many bits where the config does not say how many; others have 8."""
GROUP, GROUP_BITS = 128, 24
"""Weights of a group that has a scale and a zero, where the config does not say; and the bits of both."""
MXFP4_BITS = 4.25
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLAIN_MLP = ("opt", "gpt_neox")
"""Families whose feed-forward layers are two products, not three."""
ALTERNATE = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""Families of which one layer in so many sees the whole text, where layer_types does not say which."""


class ModelShape(NamedTuple):
    """A model's dimensions, without its weights."""

    name: str
    config: Mapping[str, Any]
    """Of the language model: of a checkpoint that also takes images, its text_config."""
    q_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Of each layer that attends, the tokens that it looks back; None: all."""
    positions: int | None
    item_bytes: int
    weight_bytes: int
    active_weight_bytes: int
    """Of these, what a decode step of one sequence reads: without the embedding table, and of experts those in use."""
    active_params: int
    """Weights that a token is multiplied with."""
    expert_bytes: int = 0
    """Of all experts together, those that every token uses not."""
    expert_share: float = 1.0
    """Of these, what one token uses."""
    state_bytes: int = 0
    """Of a sequence, in layers with a state instead of a KV cache, or beside it."""
    layers_without_kv: int = 0
    packed: bool = False
    """Whether weights stay in 4 to 8 bits."""

    def read_bytes(self, batch: int) -> int:
        """Weights that a decode step of so many sequences reads, if each chooses its experts by itself."""
        more = (1 - self.expert_share) - (1 - self.expert_share) ** batch
        return self.active_weight_bytes + round(more * self.expert_bytes)

    @property
    def layers(self) -> int:
        return len(self.windows) + self.layers_without_kv

    @property
    def full_layers(self) -> int:
        return sum(window is None for window in self.windows)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def largest(self) -> int:
        """Numbers of a token in the widest activation of a layer."""
        inner = self.config.get("intermediate_size") or self.config.get("ffn_dim") or 4 * self.hidden
        experts = self.config.get("num_experts_per_tok") or 0
        return max(int(inner), experts * int(self.config.get("moe_intermediate_size") or 0))

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])


def read_shape(name: str, config: Mapping[str, Any], dtype: str = "bfloat16") -> ModelShape:
    """dtype: of activations, and of weights that are not quantised.

    Raises ModelError for a config without a model's dimensions.
    """
    inner = config.get("text_config")
    quantised = config.get("quantization_config") or {}
    if isinstance(inner, Mapping) and "hidden_size" in inner:
        quantised = quantised or inner.get("quantization_config") or {}
        config = inner
    if any(key not in config for key in DIMENSIONS):
        from coattn.hf.kinds import with_defaults

        config = with_defaults(name, config, DIMENSIONS)
    try:
        q_heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        kv_heads = int(config.get("num_key_value_heads") or q_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // q_heads)
        table, always, experts, share = _params(config, q_heads, kv_heads, head_dim)
        windows, states = _windows(config, layers), 0
        if of_states(config):
            from coattn.hf.kinds import look_at_config

            (windows, states), (always, experts) = look_at_config(name, config, ITEM_BYTES[dtype])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"The config of {name} lacks a model's dimensions ({type(error).__name__}: {error}).",
            "Give a folder with the config.json of a causal language model.",
        ) from error
    item = ITEM_BYTES[dtype]
    bits = _bits(quantised) if quantised else 8 * item
    others = 8 * item if quantised.get("quant_method") == "mxfp4" else bits  # which is a form of experts alone
    tied = bool(config.get("tie_word_embeddings", config.get("model_type") in ("gemma", "gemma2", "gemma3_text")))
    tables = table * item * (1 if tied else 2)
    total = round(tables + (always * others + experts * bits) / 8)
    active = round(table * item + (always * others + share * experts * bits) / 8)
    if "weight_bytes" in quantised:  # of a file whose tensors were looked at
        total = int(quantised["weight_bytes"])
        active = total - int(quantised["unread_bytes"])
    positions = config.get("max_position_embeddings")
    return ModelShape(
        name,
        config,
        q_heads,
        kv_heads,
        head_dim,
        windows,
        None if positions is None else int(positions),
        item,
        total,
        active,
        table + always + round(share * experts),
        round(experts * bits / 8),
        share,
        states,
        layers - len(windows),
        bool(quantised),
    )


def _params(config: Mapping[str, Any], q_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int, float]:
    """Weights of the embedding table, of the layers without experts, of all experts, and which share of these a token
    uses."""
    hidden = int(config["hidden_size"])
    attention = hidden * head_dim * (2 * q_heads + 2 * kv_heads)
    inner = int(config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden)
    products = 2 if config.get("model_type") in PLAIN_MLP else 3
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    table, layers = int(config["vocab_size"]) * hidden, int(config["num_hidden_layers"])
    dense = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    mixed = max(0, layers - dense) if experts else 0
    small = int(config.get("moe_intermediate_size") or inner)
    shared = int(config.get("n_shared_experts") or 0) * small + int(config.get("shared_expert_intermediate_size") or 0)
    beside = (layers - mixed) * products * hidden * inner + mixed * hidden * (experts + products * shared)
    share = min(1.0, int(config.get("num_experts_per_tok") or 1) / experts) if experts else 1.0
    return table, layers * attention + beside, mixed * experts * products * hidden * small, share


def _bits(quantised: Mapping[str, Any]) -> float:
    """Of a weight, with its part of scales and zeros."""
    groups = [group["weights"] for group in (quantised.get("config_groups") or {}).values() if group.get("weights")]
    said = {**next(iter(groups), {}), **quantised}
    bits = next((said[name] for name in ("bits", "w_bit", "num_bits") if said.get(name)), None)
    bits = bits or (8 if said.get("load_in_8bit") else 4 if said.get("quant_method") in IN_4_BITS else None)
    if said.get("quant_method") == "mxfp4":
        return MXFP4_BITS
    group = int(said.get("group_size") or GROUP)
    return 8.0 if bits is None else float(bits) + (GROUP_BITS / group if group > 0 else 0)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False or config.get("model_type") in ("qwen2", "qwen3"):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(None if kind == "full_attention" else int(window) for kind in kinds)
    every = config.get("sliding_window_pattern") or ALTERNATE.get(str(config.get("model_type")))
    if not every:
        return (int(window),) * layers
    return tuple(None if (layer + 1) % int(every) == 0 else int(window) for layer in range(layers))
