"""The attention function that Transformers' modules call while a model is attached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coattn.errors import UnsupportedError
from coattn.kernels.prefill import prefill
from coattn.step.running import RunningStep
from coattn.types import LayerShape

NAME = "coattn"


class Attends(Protocol):
    """What computes attention: a runtime."""

    def attend(self, running: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The attention of one layer of a running step over packed tokens."""


class Running(Protocol):
    """What a running call continues."""

    @property
    def runtime(self) -> Attends | None:
        """None before anything is stored."""

    @property
    def running(self) -> RunningStep | None:
        """The step that the runtime has begun for the call."""


class User(Protocol):
    """Whoever runs a model's attention here: an attachment, or an engine's session."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model's attention modules."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """Their shapes."""

    @property
    def tokens(self) -> Tensor | None:
        """Which columns of the running call are tokens, `[batch, columns]`; None when all are."""

    @property
    def conversation(self) -> Running | None:
        """None for a call that stores nothing."""


_attached: WeakKeyDictionary[nn.Module, User] = WeakKeyDictionary()
"""Attention module -> who runs it."""


def enable(attachment: User) -> None:
    """Routes the attachment's modules here. The function is registered while any model is attached, not at import."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    for module in attachment.modules:
        _attached[module] = attachment


def disable(attachment: User) -> None:
    """Undoes `enable`."""
    for module in attachment.modules:
        _attached.pop(module, None)
    if not _attached:
        type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(NAME, None)


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
    attachment = _attached[module]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = attachment.layers[layer]
    if dropout:
        raise UnsupportedError("Attention dropout is not supported.", "Call model.eval() first.")
    if options.get("output_attentions"):
        raise UnsupportedError(
            "Attention weights are not kept, so output_attentions is not supported.", "Leave it out."
        )
    for name, planned in (("sliding_window", shape.sliding_window), ("softcap", shape.softcap), ("s_aux", None)):
        if name in options and options[name] != planned:
            raise UnsupportedError(
                f"Layer {layer} attends with {name}={options[name]!r}, but its config says {planned!r}.",
                "Models whose layers differ from their config are not supported.",
            )
    if (query.shape[1], key.shape[1], query.shape[3]) != (shape.q_heads, shape.kv_heads, shape.head_dim):
        raise UnsupportedError(
            f"Layer {layer} has {query.shape[1]} query and {key.shape[1]} KV heads of size {query.shape[3]}, "
            f"but the config says {shape.q_heads}, {shape.kv_heads} and {shape.head_dim}.",
            "Models whose layers differ from their config are not supported.",
        )
    if key.dtype != shape.dtype and key.dtype.itemsize >= shape.dtype.itemsize:
        computed, kept = (str(dtype).removeprefix("torch.") for dtype in (key.dtype, shape.dtype))
        raise UnsupportedError(
            f"Layer {layer} computes keys in {computed}, but the KV cache was made for {kept} and would round them.",
            "Change the model's dtype before it is attached or given to an engine, and use no autocast.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens = attachment.tokens
    with torch.no_grad():
        q, k, v = (pack(x, tokens) for x in (query, key, value))
        if attachment.conversation is not None and attachment.conversation.runtime is not None:
            out = attachment.conversation.runtime.attend(attachment.conversation.running, layer, q, k, v, scale)
        else:
            out = _without_cache(q, k, v, scale, attachment, layer, query.shape[0], query.shape[2])
        out = _unpack(out, tokens, query.shape[0], query.shape[2])
    if torch.is_grad_enabled() and query.requires_grad:
        out = _InferenceOnly.apply(query, out)  # type: ignore[no-untyped-call]
    return out, None


def _without_cache(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attachment: User, layer: int, batch: int, columns: int
) -> Tensor:
    """A forward call with `use_cache=False`: dense over each sequence's own tokens."""
    counts = [columns] * batch if attachment.tokens is None else attachment.tokens.sum(1).tolist()
    sequences = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
    shape = attachment.layers[layer]
    return torch.cat([prefill(a, b, c, scale, shape) for a, b, c in sequences if len(a)])


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
