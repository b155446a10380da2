"""`attach`: run any supported Transformers model under a method, and leave it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from coattn.cache.ledger import Ledger
from coattn.errors import InputError, UnsupportedError
from coattn.hf.ahead import Ahead
from coattn.hf.architectures import activation_dtype
from coattn.hf.attention import Call, ModelUser
from coattn.hf.conversation import CoattnCache, Conversation, check_mask, refusal
from coattn.hf.cpu_dtypes import warn_if_slow
from coattn.hf.probe import mixers_of
from coattn.method.row import Composed, Method, compose
from coattn.method.table import find_method
from coattn.part import MOST
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.units import parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = {"greedy_search", "sample"}
REFUSED = {
    "beam_search": ("Beam search", "it copies whole sequences between steps, which would move every block"),
    "assisted_generation": (
        "Assisted decoding",
        "it takes tokens back, and what a window has dropped cannot come back",
    ),
}


class Attachment(ModelUser):
    """A model under a method. Made by `attach`; `report()` says what is held where."""

    IN_USE = (
        "This model is in use already, by an attachment, a `coattn.Cache` or an engine.",
        "Leave the first `with` block, or close the cache or the engine, before attaching again.",
    )
    CHANGED = ("while attached", "Choose it before `attach` or after its `with` block.")

    def __init__(self, model: PreTrainedModel, method: str | Method, ledger: Ledger, params: dict[str, Any]) -> None:
        super().__init__(model)
        self.ledger = ledger
        self.composed = compose_over(self, method, params)
        self.signature = inspect.signature(model.get_decoder().forward)
        self.probes: list[Probe] = []
        """See the steps of every cache made from now on."""
        self.conversations: WeakSet[Conversation] = WeakSet()
        self.conversation: Conversation | None = None
        """What the forward call that is running continues; None for a call without a cache."""

    @property
    def call(self) -> Call:
        current = self.conversation
        return (None, None) if current is None else (current.runtime, current.running)

    def new_cache(self, tokens: int | None = None) -> CoattnCache:
        """An empty cache. tokens: the longest a sequence will get, where that is known; it is checked and reserved."""
        conversation = Conversation(self._new_runtime, tokens)
        self.conversations.add(conversation)
        return CoattnCache(self.model, conversation)

    def report(self) -> dict[str, Any]:
        """The method, its parameters, whether it is exact; KV bytes per tier, now and at most."""
        return report(self.composed, self.ledger, "attach")

    def close(self) -> None:
        """Gives the memory of every cache back."""
        for conversation in list(self.conversations):
            conversation.close()

    def _new_runtime(self, seqs: int, tokens: int | None) -> Runtime:
        return Runtime(self.layers, self.composed, self.ledger, seqs, tokens, probes=self.probes)

    def before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """Starts a step: finds or makes the cache, reads the mask."""
        self.check_routed()
        call = self.signature.bind(*args, **kwargs).arguments
        call |= call.pop("kwargs", {})
        inputs = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if inputs is None:
            raise InputError("The model was called without input_ids or inputs_embeds.", "Give one of them.")
        batch, columns = inputs.shape[:2]
        mask = call.get("attention_mask")
        check_mask(mask)
        cache = call.get("past_key_values")
        use_cache = call.get("use_cache")
        if cache is None and (getattr(module.config, "use_cache", True) if use_cache is None else use_cache):
            cache = call["past_key_values"] = self.new_cache()
        if cache is None:
            self.conversation = None
            self.tokens = None if mask is None or bool(mask.all()) else mask.to("cpu").bool()
            return (), call
        if not isinstance(cache, CoattnCache) or cache.conversation not in self.conversations:
            raise UnsupportedError(
                f"past_key_values is a {type(cache).__name__} that this attachment did not make.",
                "Leave past_key_values out, or pass the one that an earlier call under this attachment returned.",
            )
        self.tokens = cache.conversation.begin(batch, columns, mask)
        self.conversation = cache.conversation
        return (), call

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Ends a step that went through every layer."""
        if self.conversation is not None:
            self.conversation.commit()
        self.conversation = self.tokens = None

    def prepare_cache(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Stands in for the model's own method: `generate` gets a coattn cache that knows how long it will become."""
        mode = str(getattr(generation_mode, "value", generation_mode))
        if mode not in MODES:
            raise refusal(*REFUSED.get(mode, (f"Generation mode {mode!r}", "only greedy search and sampling are")))
        if getattr(generation_config, "cache_implementation", None) is not None:
            raise UnsupportedError(
                f"cache_implementation={generation_config.cache_implementation!r} conflicts with an attached method.",
                "Leave cache_implementation out.",
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache(int(max_cache_length))


def compose_over(user: ModelUser, method: str | Method, params: dict[str, Any]) -> Composed:
    """A method over a model. Warns where the model's dtype is slow."""
    composed = compose(find_method(method), **params)
    warn_if_slow(user.model, user.layers)
    return composed.over((shape.dtype for shape in user.layers), activation_dtype(user.model))


def report(composed: Composed, ledger: Ledger, who: str) -> dict[str, Any]:
    """What a cache outside an engine says of itself."""
    why = f"{who} runs the model's own modules layer by layer; coattn.LLM captures decode steps on a GPU"
    return {**composed.describe(), **ledger.describe(), "captured": False, "not_captured": why}


@contextmanager
def attach(
    model: PreTrainedModel,
    method: str | Method = "full",
    *,
    gpu_kv: int | float | str | None = None,
    host_kv: int | float | str | None = None,
    **params: Any,
) -> Iterator[Attachment]:
    """Runs `model` under `method` inside a `with` block; `model.generate(...)` works unchanged.

    method: a name from `coattn methods`, a TOML file with a row of your own, or a `coattn.Method`.
    gpu_kv, host_kv: budgets for KV memory per tier, such as `"2GiB"`; unlimited when left out.
    params: the method's parameters.

    On exit, also after an exception, the model is as it was before, and the caches made inside give their memory back.
    """
    ledger = Ledger(parse_bytes(gpu_kv, "gpu_kv"), parse_bytes(host_kv, "host_kv"))
    attachment, decoder = Attachment(model, method, ledger, params), model.get_decoder()
    with ExitStack() as undo:
        undo.callback(attachment.close)
        undo.enter_context(attachment.routed())
        ahead = (MOST,) if mixers_of(model) else range(len(attachment.layers))
        if any(map(attachment.composed.build().schedule.predicts, ahead)):
            undo.enter_context(Ahead(model).hooked(attachment))
        undo.callback(decoder.register_forward_pre_hook(attachment.before_forward, with_kwargs=True).remove)
        undo.callback(decoder.register_forward_hook(attachment.after_forward).remove)
        model._prepare_cache_for_generation = attachment.prepare_cache
        undo.callback(model.__dict__.pop, "_prepare_cache_for_generation")
        yield attachment
