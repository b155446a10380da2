"""The attention function that Transformers' modules call while a model is attached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coattn.errors import UnsupportedError
from coattn.hf.architectures import attention_modules, check_family, describe_layers
from coattn.kernels.prefill import prefill
from coattn.step.running import RunningStep
from coattn.types import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "coattn"
DIFFERS = "Models whose layers differ from their config are not supported."


class Attends(Protocol):
    """What computes attention: a runtime."""

    def attend(self, running: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The attention of one layer of a running step over packed tokens."""


Call = tuple[Attends | None, RunningStep | None]
"""What computes the attention of a forward call, and the step it has begun for it; neither where nothing is stored."""


class ModelUser:
    """Runs a model's attention here, inside `routed`: an attachment, or an engine's session. One per model at a time.

    Raises UnsupportedError for models that coattn does not run, and for one that is in use.
    """

    IN_USE: ClassVar[tuple[str, str]]
    CHANGED: ClassVar[tuple[str, str]]
    """What is said of a model that another user has, and of one whose attention was set by somebody else meanwhile."""
    tokens: Tensor | None = None
    """Which columns of the running call are tokens, `[batch, columns]`; None when all are."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_family(model)
        if model.config._attn_implementation == NAME:
            raise UnsupportedError(*self.IN_USE)
        self.model = model
        self.layers: list[LayerShape] = describe_layers(model)
        self.modules = attention_modules(model)

    @property
    def call(self) -> Call:
        """The forward call that is running."""
        raise NotImplementedError

    def check_routed(self) -> None:
        """Raises UnsupportedError where the model's attention was set to another one."""
        chosen = self.model.config._attn_implementation
        if chosen != NAME:
            when, hint = self.CHANGED
            raise UnsupportedError(f"The attention implementation was set to {chosen!r} {when}.", hint)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """The model's attention is computed here inside this block. The function is registered while any model's is."""
        config: Any = self.model.config
        before = config._attn_implementation_internal
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
        _users.update(dict.fromkeys(self.modules, self))
        config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            config._attn_implementation_internal = before
            for module in self.modules:
                _users.pop(module, None)
            if not _users:
                type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(NAME, None)


_users: WeakKeyDictionary[nn.Module, ModelUser] = WeakKeyDictionary()
"""Attention module -> who runs it."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """query `[batch, q_heads, t, d]`, key, value `[batch, kv_heads, t, d]` of the new columns -> attention output
    `[batch, t, q_heads, d]`. The mask is not needed: the step already says which columns are tokens.
    """
    user = _users[module]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = user.layers[layer]
    if dropout:
        raise UnsupportedError("Attention dropout is not supported.", "Call model.eval() first.")
    if options.get("output_attentions"):
        raise UnsupportedError(
            "Attention weights are not kept, so output_attentions is not supported.", "Leave it out."
        )
    for name, planned in (("sliding_window", shape.sliding_window), ("softcap", shape.softcap), ("s_aux", None)):
        if name in options and options[name] != planned:
            raise UnsupportedError(
                f"Layer {layer} attends with {name}={options[name]!r}, but its config says {planned!r}.", DIFFERS
            )
    if (query.shape[1], key.shape[1], query.shape[3]) != (shape.q_heads, shape.kv_heads, shape.head_dim):
        raise UnsupportedError(
            f"Layer {layer} has {query.shape[1]} query and {key.shape[1]} KV heads of size {query.shape[3]}, "
            f"but the config says {shape.q_heads}, {shape.kv_heads} and {shape.head_dim}.",
            DIFFERS,
        )
    if key.dtype != shape.dtype and key.dtype.itemsize >= shape.dtype.itemsize:
        computed, kept = (str(dtype).removeprefix("torch.") for dtype in (key.dtype, shape.dtype))
        raise UnsupportedError(
            f"Layer {layer} computes keys in {computed}, but the KV cache was made for {kept} and would round them.",
            "Change the model's dtype before it is attached or given to an engine, and use no autocast.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    (runtime, running), tokens = user.call, user.tokens
    batch, _, columns, _ = query.shape
    with torch.no_grad():
        q, k, v = (pack(x, tokens) for x in (query, key, value))
        if runtime is not None:
            out = runtime.attend(running, layer, q, k, v, scale)
        else:  # `use_cache=False`: dense over each sequence's own tokens
            counts = [columns] * batch if tokens is None else tokens.sum(1).tolist()
            sequences = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
            out = torch.cat([prefill(a, b, c, scale, shape) for a, b, c in sequences if len(a)])
        out = _unpack(out, tokens, batch, columns)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _InferenceOnly.apply(query, out)  # type: ignore[no-untyped-call]
    return out, None


def pack(x: Tensor, tokens: Tensor | None) -> Tensor:
    """`[batch, heads, t, d]` -> `[tokens, heads, d]`, sequence after sequence, without padding."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if tokens is None else x[tokens.to(x.device)]


def _unpack(x: Tensor, tokens: Tensor | None, batch: int, columns: int) -> Tensor:
    if tokens is None:
        return x.view(batch, columns, *x.shape[1:])
    out = x.new_zeros(batch, columns, *x.shape[1:])
    out[tokens.to(x.device)] = x
    return out


class _InferenceOnly(torch.autograd.Function):
    """Passes the attention output through, and refuses a backward pass instead of giving wrong gradients."""

    @staticmethod
    def forward(_ctx: Any, _query: Tensor, out: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(_ctx: Any, *_grads: Any) -> Any:
        raise UnsupportedError(
            "An attached model cannot be trained: coattn is for inference.", "Leave the `with` block first."
        )
