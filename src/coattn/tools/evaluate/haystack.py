"""Prompts of an exact length: real text, a needle between its sentences, a question behind it."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from coattn.errors import InputError
from coattn.text import Text

BORDER = re.compile(r"(?<=[.!?])(?=\s)")
"""Where one sentence ends and the white space before the next begins."""
PLACE = "\u2063haystack\u2063"
"""Stands for the haystack while a chat template is filled in; no text holds it."""


class Haystack:
    """A text as sentences of token ids. A text that is too short begins again."""

    def __init__(self, text: Text, tokenizer: Any, most: int) -> None:
        """most: tokens of the longest prompt. Cost: tokenises about as much text as that needs."""
        body = text.body.strip()[: most * 16]
        pieces = BORDER.split(body)
        self.sentences = [ids for ids in tokenise(tokenizer, pieces) if ids]
        if not self.sentences:
            raise InputError(f"{text.name} has no words.", "Give a text with at least one sentence.")
        self.tokenizer = tokenizer

    def fill(self, tokens: int, depth: float, needle: str) -> list[int]:
        """Ids `[tokens]`, with a needle at the sentence border nearest to its depth, from 0 to 1."""
        planted = tokenise(self.tokenizer, [needle])[0]
        own = tokens - len(planted)
        if own < 0:
            raise InputError(
                f"The prompt is {-own:,} tokens too short for its question and its needle.", "Make it longer."
            )
        straw: list[int] = []
        borders = [0]
        sentences = itertools.cycle(self.sentences)
        while len(straw) < own:
            straw += next(sentences)
            borders.append(min(len(straw), own))
        cut = min(borders, key=lambda border: abs(border - depth * own))
        return straw[:cut] + planted + straw[cut:own]


def check_length(name: str, limit: int | None, prompt: int, answer: int) -> None:
    """Raises InputError when a prompt and an answer of so many tokens do not fit in a model with so many positions."""
    if limit is not None and prompt + answer > limit:
        raise InputError(
            f"A prompt of {prompt:,} tokens and an answer of {answer:,} need {prompt + answer:,} positions, "
            f"but {name} has {limit:,}.",
            f"Give at most {limit - answer:,} tokens.",
        )


def frame(tokenizer: Any, before: str, after: str) -> tuple[list[int], list[int]]:
    """Ids of what stands before and behind the haystack, through the chat template where there is one."""
    if not getattr(tokenizer, "chat_template", None):
        first = [int(i) for i in tokenizer(before, verbose=False)["input_ids"]]
        return first, tokenise(tokenizer, [after])[0]
    messages = [{"role": "user", "content": before + PLACE + after}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head, found, tail = text.partition(PLACE)
    if not found:
        raise InputError("The model's chat template does not show the user's message.", "Use another model.")
    first, last = tokenise(tokenizer, [head, tail])
    return first, last


def tokenise(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens of the tokenizer's own."""
    return [
        [int(i) for i in ids] for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    ]
