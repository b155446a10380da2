"""Texts as prompts: nothing is asked; rows are compared along the tokens that stand behind a border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coattn.errors import InputError
from coattn.text import Text
from coattn_lab.evaluate.tasks.prompts import Prompt
from coattn_lab.evaluate.tasks.rules import TEXT

BEHIND = 136
"""Tokens behind the border: as many steps can be compared, and a few more where a cut text has other tokens."""


def make(tokenizer: Any, texts: Sequence[Text], lengths: Sequence[int], samples: int) -> list[Prompt]:
    """Of each text up to `samples` parts of each length, far apart; a text that is too short for one is refused."""
    found = []
    for text in texts:
        places = tokenizer(text.body, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in places["offset_mapping"]]
        for length in lengths:
            count = min(samples, len(starts) // length)
            if not count:
                raise InputError(
                    f"{text.name} has {len(starts):,} tokens, but {length:,} are wanted.", "Give more text."
                )
            for i in range(count):
                first = i * (len(starts) // count)
                begin, border, end = (starts[at] for at in (first, first + length - BEHIND, first + length - 1))
                parts = text.body[begin:border], text.body[border:end]
                name = f"text/{text.name}/{length}/{i}"
                found.append(Prompt(name, "text", text.name, length, *parts, "", ("-",), TEXT, 1))
    return found
