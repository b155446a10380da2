"""A batch of running sequences under one method: which columns are tokens, and the runtime that stores them; and the
cache object that Transformers carries around, a thin face of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from coattn.errors import BudgetError, CoattnError, InputError, UnsupportedError
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
            self.running = None
        if self.runtime is not None and self.runtime.torn:
            raise InputError(
                "A step over this cache failed half way and overwrote older tokens, so its contents cannot be trusted.",
                "Start again without past_key_values, or call reset() on the cache.",
            )

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
        if not all(self.runtime.goes_back(slot, keep) for slot, _, keep in back):
            raise UnsupportedError(
                "Tokens cannot be taken back from a window whose older tokens were overwritten by them.",
                "Start again without past_key_values.",
            )
        for slot, length, keep in back:
            self.runtime.truncate(slot, length, keep)
        self.real = past.clone()


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

    reorder_cache = _refusing("Beam search", "it copies whole sequences between steps, which would move every block")
    batch_repeat_interleave = _refusing("Repeating a cache", "it would copy whole sequences")
    batch_select_indices = _refusing("Selecting from a cache", "it would copy whole sequences")


class CoattnCache(Cache):  # type: ignore[misc]
    """One conversation, or a batch of them, under one method. Its memory goes back when nobody holds it any more."""

    def __init__(self, layers: int, conversation: Conversation) -> None:
        super().__init__(layers=[CoattnLayer(conversation) for _ in range(layers)])
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

    __reduce_ex__ = _refusing(
        "Copying a cache", "the copy would share its blocks", "Crop it back to the text that several prompts share."
    )
