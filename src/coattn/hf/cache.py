"""The cache object that Transformers carries around: a thin face of a Conversation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from coattn.errors import CoattnError, UnsupportedError
from coattn.hf.conversation import Conversation


def refusal(what: str, why: str) -> CoattnError:
    """The error for a kind of generation that coattn does not run."""
    return UnsupportedError(f"{what} is not supported: {why}.", "Use greedy search or sampling.")


def _refusing(what: str, why: str) -> Callable[..., None]:
    def method(*_: Any, **__: Any) -> None:
        raise refusal(what, why)

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
        return self.conversation.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.conversation.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def reset(self) -> None:
        self.conversation.reset()

    reorder_cache = _refusing("Reordering a cache", "it would copy whole sequences between steps")
    crop = _refusing("Cropping a cache", "what a window has dropped cannot come back")
    batch_repeat_interleave = _refusing("Repeating a cache", "it would copy whole sequences")
    batch_select_indices = _refusing("Selecting from a cache", "it would copy whole sequences")


class CoattnCache(Cache):  # type: ignore[misc]
    """One conversation, or a batch of them, under one method. Its memory goes back when nobody holds it any more."""

    def __init__(self, layers: int, conversation: Conversation) -> None:
        super().__init__(layers=[CoattnLayer(conversation) for _ in range(layers)])
        self.conversation = conversation
        weakref.finalize(self, conversation.close)
