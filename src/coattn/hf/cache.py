"""`Cache`: a method as the `past_key_values` of Transformers, without a `with` block and without hooks.

The cache hands a layer's new keys over as `NewKeys`, which name it. The attention function that takes them begins a
step at the first layer and commits it at the last.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import UnsupportedError
from coattn.hf.architectures import check_family, check_inference
from coattn.hf.attach import compose_over, report
from coattn.hf.attention import CACHED, Call, ModelUser, user_of
from coattn.hf.conversation import CoattnCache, Conversation, check_mask, half_done
from coattn.hf.probe import look_at
from coattn.method.row import Composed, Method
from coattn.part import MOST
from coattn.step.runtime import Runtime
from coattn.units import parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NewKeys:
    """A layer's new keys on their way from `Cache.update` to coattn's attention. Another attention, which would take
    them for the whole text, cannot touch them."""

    def __init__(self, conversation: Conversation, keys: Tensor) -> None:
        self.conversation, self.keys = conversation, keys

    def __getattr__(self, name: str) -> Any:
        raise _other_model()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise _other_model()


def _other_model() -> UnsupportedError:
    return UnsupportedError(
        "A coattn.Cache was passed to a model that it was not made for.",
        "Make one for each model: coattn.Cache(model).",
    )


class CachedModel(ModelUser):
    """A model while caches for it are open. The first sets its attention implementation, the last restores it."""

    IN_USE = (
        "This model is in use already, by `coattn.attach` or by an engine.",
        "Leave the `with` block, or close the engine, before making a `coattn.Cache`.",
    )
    CHANGED = ("while a coattn.Cache is open", "Close the cache before setting it.")
    implementation = CACHED

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.open: set[Conversation] = set()
        """Of caches that are not closed."""
        self.conversation: Conversation | None = None
        """What the layer that is attending continues."""
        self.last = look_at(model)[-1].index
        """Of the layers that attend, the last one's number in the model."""
        self._next = 0
        """The layer that attends next in the running forward call."""
        self._undo = ExitStack()

    @staticmethod
    def of(model: PreTrainedModel) -> CachedModel:
        """The user that runs a model under its open caches, or a new one."""
        check_family(model)
        user = user_of(model)
        return user if isinstance(user, CachedModel) else CachedModel(model)

    def add(self, conversation: Conversation) -> None:
        self.open.add(conversation)
        if user_of(self.model) is not self:
            self._undo.enter_context(self.routed())

    def remove(self, conversation: Conversation) -> None:
        """Gives the conversation's memory back."""
        conversation.close()
        self.open.discard(conversation)
        if not self.open:
            self._undo.close()

    @property
    def call(self) -> Call:
        assert self.conversation is not None
        return self.conversation.runtime, self.conversation.running

    def keys_of(self, handed: Any) -> Tensor:
        if not isinstance(handed, NewKeys):
            raise UnsupportedError(
                "A coattn.Cache is open for this model, and this call does not use it.",
                "Pass it as past_key_values, with use_cache on, or close it first.",
            )
        if handed.conversation not in self.open:
            raise _other_model()
        self.conversation = handed.conversation
        return handed.keys

    def enter_layer(self, layer: int, batch: int, columns: int, mask: Tensor | None) -> None:
        assert self.conversation is not None
        if layer == 0:
            check_inference(self.model)
            check_mask(mask)
            self.tokens, self._next = self.conversation.begin(batch, columns, mask), 0
        if layer != self._next or self.conversation.running is None:
            raise UnsupportedError(
                f"Layer {layer} attends when it is the turn of layer {self._next}.",
                "A coattn.Cache takes every layer once a forward call, in order.",
            )

    def leave_layer(self, layer: int) -> None:
        assert self.conversation is not None
        self._next = (layer + 1) % len(self.layers)
        if self._next == 0:
            self.conversation.commit()


class Cache(CoattnCache, AbstractContextManager["Cache"]):
    """The `past_key_values` of one conversation, or of a batch of them, with the KV kept under a method.

    ```python
    cache = coattn.Cache(model, "cpu", gpu_kv="2GiB")
    model.generate(**inputs, past_key_values=cache)
    ```

    While any cache of a model is open, the model's attention implementation is `coattn` and every call of it takes one.
    `close`, the end of a `with` block, or dropping the cache gives its memory back; with the last one the model is as
    it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "full",
        *,
        gpu_kv: int | float | str | None = None,
        host_kv: int | float | str | None = None,
        max_length: int | None = None,
        **params: Any,
    ) -> None:
        """method, gpu_kv, host_kv, params: as for `attach`; methods that predict queries are refused.

        max_length: the most tokens that a sequence will get, where that is known; it is checked and reserved.
        """
        self.ledger = Ledger(parse_bytes(gpu_kv, "gpu_kv"), parse_bytes(host_kv, "host_kv"))
        user = CachedModel.of(model)
        self.composed: Composed = compose_over(user, method, params)
        if self.composed.build().schedule.predicts(MOST):
            name = self.composed.method.name
            raise UnsupportedError(
                f"Method {name!r} predicts queries by hooks in the layers, which a coattn.Cache does not set.",
                f"Use `with coattn.attach(model, {name!r})`.",
            )
        conversation = Conversation(partial(Runtime, user.layers, self.composed, self.ledger), max_length)
        super().__init__(model, conversation)
        self._model = user
        user.add(conversation)
        self._close = weakref.finalize(self, user.remove, conversation)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Hands a layer's new keys and values on; coattn's attention stores them."""
        self.conversation.check_open()
        self._model.check_routed()
        return NewKeys(self.conversation, key_states), value_states

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._enter_state(layer_idx)
        return cast("Tensor | None", super().get_conv_state(layer_idx, *args, **kwargs))

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        if layer_idx is not None and not hasattr(CoattnCache, "get_conv_state"):  # before 5.20, mixers ask this alone
            self._enter_state(layer_idx)
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))

    def _enter_state(self, index: int) -> None:
        """A layer is about to change its state. Every call must come to every layer, since a state cannot go back; the
        last layers run after the step's commit."""
        conversation, layer = self.conversation, self.layers[index]
        after = index > self._model.last
        if layer.calls != conversation.commits - after:
            raise half_done()
        layer.calls += 1

    def report(self) -> dict[str, Any]:
        """The method, its parameters, whether it is exact; KV bytes per tier, now and at most."""
        return report(self.composed, self.ledger, "coattn.Cache")

    def close(self) -> None:
        """Gives the memory back, for good. Without another open cache, the model is as it was."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()
