"""What a model's attention is: its decoder is called without weights, and what it hands to attention is kept."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coattn.errors import CoattnError, UnsupportedError, one_line
from coattn.hf.refusals import quiet

NAME, TOKENS = "coattn_probe", 2
OF_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""As Transformers calls layers with a state in place of, or beside, a KV cache."""
WITHOUT_CACHE = {"moe", "mlp"}
PASSED = {"position_ids", "use_cache", "output_attentions", "is_causal", "sliding_window", "softcap"}
"""Options of attention functions that are followed or change nothing."""
HINT = "Choose a model of another family; docs/families.md lists those that were tested."
_running = Lock()


@dataclass(frozen=True)
class Attention:
    """The attention of one layer."""

    name: str
    """Of its module in the decoder."""
    index: int
    """The layer's number in the model, of which other layers may have no attention."""
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: str | None
    """Of its parameter that is added to every softmax as a score without a value, one for each query head."""
    norm: str | None
    """Of the layer's module, the norm between its input and the attention; "": there is none; None: something else."""

    @property
    def layer(self) -> str:
        """Of the decoder layer's module: the member of a list that the attention is in."""
        return _layer_of(self.name)


@dataclass(frozen=True)
class Mixer:
    """A module with a state instead of a KV cache: linear attention, Mamba, or a short convolution."""

    name: str
    """Of the module in the decoder."""
    index: int
    """The layer's number in the model."""
    states: tuple[tuple[str, int, tuple[int, ...], torch.dtype | None], ...]
    """`conv` or `recurrent`, its number, its shape without the batch, its dtype; None: that of activations."""


class Seen(NamedTuple):
    """What a call of a decoder shows."""

    attentions: tuple[Attention, ...]
    mixers: tuple[Mixer, ...]


def _layer_of(name: str) -> str:
    names = name.split(".")
    return ".".join(names[: 1 + next((i for i, name in enumerate(names) if name.isdigit()), len(names))])


def look_at(model: PreTrainedModel) -> tuple[Attention, ...]:
    """The attention of each layer that has one, on whatever device the weights are. Takes up to a second, once a
    config.

    Raises UnsupportedError for attention that coattn cannot compute.
    """
    return see(model).attentions


def mixers_of(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """The modules with a state, in the order in which they run; like `look_at`."""
    return see(model).mixers


def see(model: PreTrainedModel) -> Seen:
    """`look_at` and `mixers_of` at once."""
    decoder: Any = model.get_decoder()
    if not hasattr(decoder, "config"):
        said = f"{type(model).__name__} does not say which of its modules is the decoder: it names a"
        raise UnsupportedError(f"{said} {type(decoder).__name__}.", HINT)
    text = json.dumps({**decoder.config.to_dict(), "name_or_path": None}, sort_keys=True, default=str)
    key = type(decoder), text
    if key not in _seen:
        _seen[key] = _look(type(decoder), copy.deepcopy(decoder.config))
    return _seen[key]


_seen: dict[tuple[type, str], Seen] = {}


class _Watched(DynamicCache):  # type: ignore[misc]
    """Notes which module changes a layer's state."""

    def __init__(self, config: Any, running: list[nn.Module]) -> None:
        super().__init__(config=config)
        self.running, self.layer_of = running, dict[nn.Module, int]()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self.layer_of[self.running[-1]] = layer_idx
        return super().update_conv_state(conv_states, layer_idx, *args, **options)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self.layer_of[self.running[-1]] = layer_idx
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **options)

    def mixers(self, names: dict[nn.Module, str]) -> tuple[Mixer, ...]:
        made = []
        for module, index in self.layer_of.items():
            held = [("conv", self.layers[index].conv_states), ("recurrent", self.layers[index].recurrent_states)]
            states = tuple(
                (kind, number, tuple(x.shape[1:]), None if x.dtype is torch.bfloat16 else x.dtype)
                for kind, found in held
                for number, x in found.items()
                if x is not None
            )
            made.append(Mixer(names[module], index, states))
        return tuple(made)


def _look(kind: Callable[[Any], nn.Module], config: Any) -> Seen:
    family = str(config.model_type)
    config._attn_implementation_internal, config._experts_implementation = "eager", "batched_mm"
    seen: list[Attention] = []
    modules: dict[str, nn.Module] = {}
    names: dict[nn.Module, str] = {}
    windows: dict[int, tuple[Any, Any]] = {}
    masks: list[Tensor] = []
    inputs: dict[nn.Module, Any] = {}
    outputs: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []
    kinds = getattr(config, "layer_types", None) or ()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        inputs[module] = args[0] if args else kwargs.get("hidden_states")

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        running.pop()
        outputs[module] = output

    def make_mask(q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **_: Any) -> Tensor:
        masks.append(torch.empty(1, 1, q_length, kv_length, device="meta"))
        windows[id(masks[-1])] = mask_function, local_size
        return masks[-1]

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        layer, (_, q_heads, _, head_dim) = getattr(module, "layer_idx", None), query.shape
        said = f"Layer {layer} of family {family!r}"
        options.pop("dropout", None)
        logits = options.pop("s_aux", None)
        sinks = next((name for name, own in module.named_parameters(recurse=False) if own is logits), None)
        if logits is not None and (sinks is None or logits.shape != (q_heads,)):
            raise UnsupportedError(f"{said} has attention sinks that are not one parameter for each query head.", HINT)
        unknown = sorted(name for name, value in options.items() if value is not None and name not in PASSED)
        if unknown:
            raise UnsupportedError(f"{said} attends with {unknown[0]}, which coattn does not know.", HINT)
        if not isinstance(layer, int) or module not in names or (seen and seen[-1].index >= layer):
            raise UnsupportedError(f"{said} attends twice, or another one in its turn.", HINT)
        if value.shape != key.shape or key.shape[-1] != head_dim or q_heads % key.shape[1]:
            shapes = ", ".join(str(list(x.shape[1:])) for x in (query, key, value))
            raise UnsupportedError(f"{said} has queries, keys and values {shapes}, which do not fit together.", HINT)
        window = _window(*windows.get(id(attention_mask), (None, None)))
        if window is None and getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
            window = 0  # only the family's own cache would forget
        if window == 0 or options.get("sliding_window", window or None) != window:
            raise UnsupportedError(f"{said} attends under a mask that is neither causal nor a sliding window.", HINT)
        cap = options.get("softcap")
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        whole, given = modules[_layer_of(names[module])], inputs[module]
        before = [name for name, child in whole.named_children() if outputs.get(child) is given]
        norms = [name for name in before if inputs[modules[f"{_layer_of(names[module])}.{name}"]] is inputs[whole]]
        norm = norms[0] if norms else "" if given is inputs[whole] else None
        sizes, cap = (q_heads, key.shape[1], head_dim), cap and float(cap)
        seen.append(Attention(names[module], layer, *sizes, scale, window, cap, sinks, norm))
        return query.transpose(1, 2), None

    try:
        with quiet(), torch.device("meta"), torch.no_grad(), registered(attend, make_mask):
            decoder: Any = kind(config).eval()
            modules |= dict(decoder.named_modules())
            names |= {module: name for name, module in modules.items()}
            for module in names:
                module.register_forward_pre_hook(enter, with_kwargs=True)
                module.register_forward_hook(leave)
                getattr(module, "config", config)._attn_implementation_internal = NAME
            cache = _Watched(config, running) if OF_STATES.intersection(kinds) else None
            if cache is not None:
                decoder.to(torch.bfloat16)  # a state in another dtype has that of its own
            ids, past = torch.zeros(1, TOKENS, dtype=torch.long), {} if cache is None else {"past_key_values": cache}
            mask = ids + 1 if cache is None else torch.ones(1, TOKENS, dtype=torch.long, device="cpu")  # looked at
            decoder(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=cache is not None, **past)
            mixers = () if cache is None else cache.mixers(names)
    except CoattnError:
        raise
    except Exception as error:
        said = f"Models of family {family!r} do not show their attention in a call without weights: {one_line(error)}."
        raise UnsupportedError(said, HINT) from error
    layers = getattr(config, "num_hidden_layers", len(seen))
    known = {each.index for each in seen} | {each.index for each in mixers}
    known |= {i for i, layer in enumerate(kinds) if layer in WITHOUT_CACHE}
    if not seen or len(known) != layers:
        raise UnsupportedError(
            f"Models of family {family!r} attend through Transformers' interface in {len(seen)} of {layers} layers, "
            f"and {len(mixers)} have a state.",
            "Models with other layers, or without attention, are not supported.",
        )
    return Seen(tuple(seen), mixers)


def _window(allowed: Any, size: int | None) -> int | None:
    """Tokens that a mask lets a query look back; None: all; 0: it is neither causal nor a sliding window.

    allowed: says of the numbers of a sequence, a head, a query and a key whether they meet.
    """

    def meets(query: int, key: int) -> bool:
        return bool(allowed(*map(torch.tensor, (0, 0, query, key))))

    with torch.device("cpu"):
        if allowed is None:
            return 0
        if size is None:
            return None if meets(9, 0) and meets(9, 9) and not meets(9, 10) else 0
        at = 2 * size + 1
        sees = [meets(at, key) for key in (at - size, at - size + 1, at, at + 1)]
        return size if sees == [False, True, True, False] else 0


@contextmanager
def registered(attend: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Transformers knows an attention of this name inside the block; one block at a time."""
    with _running:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
        try:
            yield
        finally:
            for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                type(functions)._global_mapping.pop(NAME, None)


@contextmanager
def routed_to(config: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Modules with this config hand their queries to `attend` inside the block."""
    before = config._attn_implementation_internal
    with registered(attend, lambda **_: None):
        config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            config._attn_implementation_internal = before
