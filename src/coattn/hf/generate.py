"""How long prompts may be."""

from __future__ import annotations

from coattn.errors import InputError
from coattn.hf.load import Loaded


def positions(loaded: Loaded) -> int | None:
    """The longest sequence the model was made for."""
    found = getattr(loaded.model.config, "max_position_embeddings", None)
    return int(found) if found else None


def room(name: str, limit: int | None, tokens: int, what: str = "The prompt") -> int | None:
    """Of a model's positions, those left after `tokens`; None: no limit. Raises InputError when there are none."""
    if limit is None:
        return None
    if tokens >= limit:
        raise InputError(
            f"{what} has {tokens:,} tokens, but {name} has only {limit:,} positions.",
            "Shorten it, or use a model with a longer context.",
        )
    return limit - tokens
