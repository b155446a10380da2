"""The attention function that Transformers' modules call while a model is attached, or has a `coattn.Cache`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coattn.errors import UnsupportedError
from coattn.hf.architectures import attention_modules, check_family, describe_layers
from coattn.kernels.prefill import prefill
from coattn.step.running import RunningStep
from coattn.types import LayerShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHED, ATTACHED = "coattn", "coattn_attached"
"""Attention implementations, by name: of a model with a `coattn.Cache`, whose masks come with the queries; and of one
whose steps are begun by somebody else. For those Transformers makes no masks: that would wait for a GPU."""
DIFFERS = "Models whose layers differ from their config are not supported."


class Attends(Protocol):
    """What computes attention: a runtime."""

    def attend(self, running: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The attention of one layer of a running step over packed tokens."""


Call = tuple[Attends | None, RunningStep | None]
"""What computes the attention of a forward call, and the step it has begun for it; neither where nothing is stored."""


class ModelUser:
    """Runs a model's attention here, inside `routed`: an attachment, an engine's session, or the caches of a model. One
    per model at a time.

    Raises UnsupportedError for models that coattn does not run, and for one that is in use.
    """

    IN_USE: ClassVar[tuple[str, str]]
    CHANGED: ClassVar[tuple[str, str]]
    """What is said of a model that another user has, and of one whose attention was set by somebody else meanwhile."""
    implementation: ClassVar[str] = ATTACHED
    tokens: Tensor | None = None
    """Which columns of the running call are tokens, `[batch, columns]`; None when all are."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_family(model)
        if model.config._attn_implementation in (CACHED, ATTACHED):
            raise UnsupportedError(*self.IN_USE)
        self.model = model
        self.layers: list[LayerShape] = describe_layers(model)
        self.modules = attention_modules(model)
        self.numbers = {module: number for number, module in enumerate(self.modules)}
        """Of those layers that attend."""

    @property
    def call(self) -> Call:
        """The forward call that is running."""
        raise NotImplementedError

    def keys_of(self, handed: Any) -> Tensor:
        """The new keys, of what a module hands to its attention."""
        return cast("Tensor", handed)

    def enter_layer(self, layer: int, batch: int, columns: int, mask: Tensor | None) -> None:
        """A layer is about to attend; mask: what Transformers made for it."""

    def leave_layer(self, layer: int) -> None:
        """A layer has attended."""

    def storing(self) -> AbstractContextManager[object]:
        """The mode of PyTorch in which a layer stores and attends: a cache that is filled in inference mode may be
        needed outside it."""
        return torch.inference_mode(False)

    def check_routed(self) -> None:
        """Raises UnsupportedError where the model's attention was set to another one."""
        chosen = self.model.config._attn_implementation
        if chosen != self.implementation:
            when, hint = self.CHANGED
            raise UnsupportedError(f"The attention implementation was set to {chosen!r} {when}.", hint)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """The model's attention is computed here inside this block. The function is registered while any model's is."""
        config, name = cast("Any", self.model.config), self.implementation
        before = config._attn_implementation_internal
        ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
        if name == CACHED:
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask_as_given)
        _users.update(dict.fromkeys(self.modules, self))
        config._attn_implementation_internal = name
        try:
            yield
        finally:
            if config._attn_implementation_internal == name:
                config._attn_implementation_internal = before
            for module in self.modules:
                _users.pop(module, None)
            if all(user.implementation != name for user in _users.values()):
                for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                    type(functions)._global_mapping.pop(name, None)


_users: WeakKeyDictionary[nn.Module, ModelUser] = WeakKeyDictionary()
"""Attention module -> who runs it."""


def user_of(model: PreTrainedModel) -> ModelUser | None:
    """Who runs a model's attention."""
    return _users.get(attention_modules(model)[0])


def _mask_as_given(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Stands in for a function that makes masks of all pairs: which columns are tokens is enough here."""
    return attention_mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """query `[batch, q_heads, t, d]`, key, value `[batch, kv_heads, t, d]` of the new columns -> attention output
    `[batch, t, q_heads, d]`. The mask is needed where no step has begun: a step says which columns are tokens.
    """
    user = _users.get(module)
    if user is None:
        raise UnsupportedError(
            "This model's attention implementation is coattn's, but coattn does not run the model.",
            'Call model.set_attn_implementation("sdpa") first.',
        )
    key = user.keys_of(key)
    layer = user.numbers[module]
    shape = user.layers[layer]
    if dropout:
        raise UnsupportedError("Attention dropout is not supported.", "Call model.eval() first.")
    if options.get("output_attentions"):
        raise UnsupportedError(
            "Attention weights are not kept, so output_attentions is not supported.", "Leave it out."
        )
    for name, planned in (("sliding_window", shape.sliding_window), ("softcap", shape.softcap)):
        if name in options and options[name] != planned:
            raise UnsupportedError(
                f"Layer {layer} attends with {name}={options[name]!r}, but its config says {planned!r}.", DIFFERS
            )
    if options.get("s_aux", shape.sink_logits) is not None and shape.sink_logits is None:
        raise UnsupportedError(f"Layer {layer} attends with sinks, but in a call without weights it did not.", DIFFERS)
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
            "Change the model's dtype before coattn runs it, and use no autocast.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, _, columns, _ = query.shape
    user.enter_layer(layer, batch, columns, attention_mask)
    (runtime, running), tokens = user.call, user.tokens
    with user.storing(), torch.no_grad():
        q, k, v = (pack(x, tokens) for x in (query, key, value))
        if runtime is not None:
            out = runtime.attend(running, layer, q, k, v, scale)
        else:  # `use_cache=False`: dense over each sequence's own tokens
            counts = [columns] * batch if tokens is None else tokens.sum(1).tolist()
            sequences = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
            out = torch.cat([prefill(a, b, c, scale, shape) for a, b, c in sequences if len(a)])
        out = _unpack(out, tokens, batch, columns)
        user.leave_layer(layer)
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
            "A model whose attention coattn computes cannot be trained: coattn is for inference.",
            "Leave the `with` block, or close the cache, first.",
        )
