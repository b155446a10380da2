"""A batch of running sequences under one method: which columns are tokens, and the runtime that stores them; and the
cache object that Transformers carries around, a thin face of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from coattn.errors import BudgetError, CoattnError, InputError, UnsupportedError
from coattn.hf.probe import look_at, mixers_of
from coattn.step.running import RunningStep
from coattn.step.runtime import Runtime
from coattn.types import Step


class Conversation:
    """What a cache stands for.

    Transformers counts columns, padding included; the cache counts real tokens. `real` `[batch, columns]` says which is
    which, so padding is never stored and never attended.
    """

    def __init__(self, new_runtime: Callable[[int, int | None], Runtime], tokens: int | None) -> None:
        """new_runtime: for so many sequences of at most so many tokens."""
        self.new_runtime, self.tokens = new_runtime, tokens
        self.runtime: Runtime | None = None
        self.real = torch.zeros(0, 0, dtype=torch.bool)
        self.running: RunningStep | None = None
        """From `begin` to `commit`; after a step that failed half way, until the next call takes it back."""
        self.closed = False
        self.states: list[StateLayer] = []
        """Of layers with a state instead of a KV cache."""
        self.commits = 0

    @property
    def columns(self) -> int:
        return int(self.real.shape[1])

    def lengths(self) -> tuple[int, ...]:
        """Stored tokens of each sequence."""
        return tuple(self.real.sum(1).tolist())

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, batch: int, columns: int, mask: Tensor | None) -> Tensor | None:
        """Starts a step of `[batch, columns]` new columns; mask `[batch, past + columns]` or None.

        Returns which of the new columns are tokens, `[batch, columns]`, or None when all are. Raises, leaving
        everything as it was, when the step cannot run.
        """
        self.check_open()
        self._undo()
        self._check_batch(batch)
        past, new = self._split(batch, columns, mask)
        self._forget(past)
        if self.states and bool((torch.cat([past, new] if self.columns else [new], 1).int().diff(dim=1) < 0).any()):
            raise UnsupportedError(
                "attention_mask hides a column after a token, which a state would count as a token.",
                "Pad on the left, at the start of the text alone.",
            )
        if self.runtime is None:
            self.runtime = self._open(batch)
            self.real = torch.zeros(batch, 0, dtype=torch.bool)
        step = Step.of(tuple(range(batch)), self.lengths(), tuple(new.sum(1).tolist()))
        self.running, self._new = self.runtime.begin(step), new
        return None if bool(new.all()) else new

    @torch.inference_mode(False)
    @torch.no_grad()
    def commit(self) -> None:
        """The step went through every layer."""
        assert self.runtime is not None
        assert self.running is not None
        self.runtime.commit(self.running)
        self.real = torch.cat([self.real, self._new], 1)
        self.running = None
        self.commits += 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def crop(self, columns: int) -> None:
        """Forgets the last columns."""
        self._undo()
        left = max(0, self.columns - columns)
        self._forget(self.real & (torch.arange(self.columns) < left))
        self.real = self.real[:, :left]

    def reset(self) -> None:
        """Forgets everything and gives the memory back."""
        for layer in self.states:
            layer.clear()
        self.commits = 0
        if self.runtime is not None:
            self.runtime.release()
            self.runtime = None
        self.real = torch.zeros(0, 0, dtype=torch.bool)
        self.running = None

    def close(self) -> None:
        """`reset`, for good."""
        self.reset()
        self.closed = True

    def _open(self, batch: int) -> Runtime:
        try:
            return self.new_runtime(batch, self.tokens)
        except BudgetError:
            gc.collect()  # caches that nobody holds any more may sit in reference cycles of their owners
            return self.new_runtime(batch, self.tokens)

    def check_open(self) -> None:
        """Raises InputError after `close`."""
        if self.closed:
            raise InputError(
                "This cache is closed: its memory was given back.",
                "Make a new one; a cache of `attach` ends with its `with` block.",
            )

    def _undo(self) -> None:
        """Takes back a step that an exception ended, so that only whole steps are stored."""
        if self.runtime is not None and self.running is not None:
            self.runtime.abort(self.running)
            if self.states:
                self.runtime.torn.update(range(len(self.real)))
            self.running = None
        if self.runtime is not None and self.runtime.torn:
            raise half_done()

    def _check_batch(self, batch: int) -> None:
        if self.runtime is not None and batch != len(self.real):
            raise InputError(
                f"The cache holds {len(self.real)} sequence(s), but the step has {batch}.",
                "Continue a cache with the batch it was made with.",
            )

    def _split(self, batch: int, columns: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mask over past columns and over new ones."""
        if mask is None:
            return self.real, torch.ones(batch, columns, dtype=torch.bool)
        mask = mask.to("cpu").bool()
        if mask.shape == (batch, columns) and self.columns:
            return self.real, mask  # only the new columns are given
        if mask.shape != (batch, self.columns + columns):
            raise InputError(
                f"attention_mask has shape {list(mask.shape)}, but the cache holds {self.columns} columns and the step "
                f"adds {columns}.",
                "Give a mask over all columns, past and new.",
            )
        return mask[:, : self.columns], mask[:, self.columns :]

    def _forget(self, past: Tensor) -> None:
        """Takes back tokens that the mask now hides, as a new turn does with what was generated after an end token."""
        if self.runtime is None or torch.equal(past, self.real):
            return
        if (past & ~self.real).any():
            raise UnsupportedError(
                "attention_mask shows a column that was hidden when it was computed, so it was never stored.",
                "Start again without past_key_values.",
            )
        back = []
        for slot, length in enumerate(self.lengths()):
            keep = int(past[slot].sum())
            if not bool(past[slot][self.real[slot]][:keep].all()):
                raise UnsupportedError(
                    f"attention_mask hides tokens in the middle of sequence {slot}, which are already stored.",
                    "Only the last tokens of a sequence can be taken back; start again without past_key_values.",
                )
            if keep < length:
                back.append((slot, length, keep))
        if self.states and back:
            raise UnsupportedError(
                "Tokens cannot be taken back from a model whose layers have a state: it is that after the last token.",
                "Start again without past_key_values, or keep one cache for each text.",
            )
        if not all(self.runtime.goes_back(slot, keep) for slot, _, keep in back):
            raise UnsupportedError(
                "Tokens cannot be taken back from a window whose older tokens were overwritten by them.",
                "Start again without past_key_values.",
            )
        for slot, length, keep in back:
            self.runtime.truncate(slot, length, keep)
        self.real = past.clone()


def half_done() -> InputError:
    """The error after a step that cannot be taken back."""
    return InputError(
        "A step over this cache failed half way and overwrote older tokens, so its contents cannot be trusted.",
        "Start again without past_key_values, or call reset() on the cache.",
    )


def check_mask(mask: object) -> None:
    """Raises UnsupportedError for a mask of pairs."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise UnsupportedError(
            "attention_mask is not a [batch, columns] tensor, and custom masks are not supported.",
            "Give a two-dimensional mask that marks padding.",
        )


def refusal(what: str, why: str, hint: str = "Use greedy search or sampling.") -> CoattnError:
    """The error for a kind of generation that coattn does not run."""
    return UnsupportedError(f"{what} is not supported: {why}.", hint)


def _refusing(what: str, why: str, *hint: str) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> None:
        raise refusal(what, why, *hint)

    return method


class CoattnLayer(CacheLayerMixin):  # type: ignore[misc]
    """What Transformers asks of a layer. The tokens themselves are in the runtime's caches."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the runtime opens its caches at the first step."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands the new keys and values on: the attention function stores them."""
        if self.conversation.running is None:
            raise UnsupportedError(
                "A coattn cache was used outside the attachment that made it.", "Use it inside its `with` block."
            )
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not query_length:
            raise InputError(
                f"This call adds no tokens to a cache that holds {self.conversation.columns} columns.",
                "Pass the whole text, with what the cache holds; for another text call reset() on the cache.",
            )
        return self.conversation.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.conversation.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def reset(self) -> None:
        self.conversation.reset()


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A layer with a state instead of a KV cache, as Transformers keeps it. A state is that after the last column: it
    cannot lose tokens."""

    def __init__(self, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.calls = 0
        """Forward calls that have come to this layer, where somebody counts them."""

    def clear(self) -> None:
        """Forgets the states and gives their memory back."""
        StateLayer.__init__(self, self.number_of_states)


class CoattnStateLayer(StateLayer, CoattnLayer):
    """A layer that has both: attention beside Mamba."""

    is_compileable = False

    def __init__(self, conversation: Conversation, number_of_states: int) -> None:
        CoattnLayer.__init__(self, conversation)
        StateLayer.__init__(self, number_of_states)

    def reset(self) -> None:
        StateLayer.reset(self)
        CoattnLayer.reset(self)


class CoattnCache(Cache):  # type: ignore[misc]
    """One conversation, or a batch of them, under one method. Its memory goes back when nobody holds it any more."""

    def __init__(self, model: PreTrainedModel, conversation: Conversation) -> None:
        super().__init__(layers=_layers(model, conversation))
        self.conversation = conversation
        weakref.finalize(self, conversation.close)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last columns of all sequences, as many as the negative number says."""
        if tokens_to_remove > 0:
            raise InputError(
                f"crop({tokens_to_remove}) is not supported: it takes a negative number, of columns to remove.",
                f"To keep {tokens_to_remove} columns: cache.crop({tokens_to_remove} - cache.get_seq_length()).",
            )
        self.conversation.crop(-tokens_to_remove)

    reorder_cache = _refusing("Beam search", "it copies whole sequences between steps, which would move every block")
    batch_repeat_interleave = _refusing("Repeating a cache", "it would copy whole sequences")
    batch_select_indices = _refusing("Selecting from a cache", "it would copy whole sequences")
    __reduce_ex__ = _refusing(
        "Copying a cache", "the copy would share its blocks", "Crop it back to the text that several prompts share."
    )


def _layers(model: PreTrainedModel, conversation: Conversation) -> list[Any]:
    """Of a cache: coattn's where a layer attends, and Transformers' own where it has a state or nothing."""
    attends, mixes = {each.index for each in look_at(model)}, {each.index for each in mixers_of(model)}
    if not mixes:
        return [CoattnLayer(conversation) for _ in attends]
    layers: list[Any] = DynamicCache(config=model.get_decoder().config).layers
    for i in attends | mixes:
        states = getattr(layers[i], "number_of_states", 0)
        if i not in mixes:
            layers[i] = CoattnLayer(conversation)
        else:
            layers[i] = CoattnStateLayer(conversation, states) if i in attends else StateLayer(states)
            conversation.states.append(layers[i])
    return layers
