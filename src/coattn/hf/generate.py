"""Prompts as a model takes them, and how long they may be."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.errors import InputError
from coattn.hf.load import Loaded
from coattn.hf.refusals import one_line


def encode_prompt(loaded: Loaded, prompt: str, raw: bool = False) -> Tensor:
    """Prompt -> ids `[tokens]`, through the chat template where the tokenizer has one and `raw` is not asked for."""
    tokenizer = loaded.tokenizer
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
    else:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template is a program that came with the model
            raise InputError(
                f"The chat template of {loaded.name} fails: {one_line(error)}.",
                "Correct it, or use the prompt as it is.",
            ) from error
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    return torch.as_tensor(ids[0])


def positions(loaded: Loaded) -> int | None:
    """The longest sequence the model was made for."""
    found = getattr(loaded.model.config, "max_position_embeddings", None)
    return int(found) if found else None


def room(loaded: Loaded, tokens: int, what: str = "The prompt") -> int | None:
    """Positions left after `tokens`; None when the model has no limit. Raises InputError when there are none."""
    limit = positions(loaded)
    if limit is None:
        return None
    if tokens >= limit:
        raise InputError(
            f"{what} has {tokens:,} tokens, but {loaded.name} has only {limit:,} positions.",
            "Shorten it, or use a model with a longer context.",
        )
    return limit - tokens
