"""Needles in the three forms of HCAttention's section 4.3 and appendix A, and a pass key, as prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coattn.text import Text
from coattn.tools.evaluate.haystack import Haystack, tokenise
from coattn.tools.evaluate.needle import BEFORE as KEY_BEFORE
from coattn.tools.evaluate.needle import NEEDLE, QUESTION, draw_key
from coattn_lab.evaluate.tasks.prompts import Prompt

NEW_TOKENS = 32
MARGIN = 96
"""Tokens for the chat template, and for a text that becomes longer when it is cut into tokens again."""
ASK = "\n\nWhat is the best thing to do in {place}? Answer in one sentence, from the text above alone."
BEFORE = "Read the following text. I will ask you about something that is said in it.\n\n"


@dataclass(frozen=True)
class Form:
    """A sentence to hide, and the words of it that an answer must have: the paper names no rule."""

    place: str
    needle: str
    outputs: tuple[str, ...]


FORMS = {
    "needle_paris": Form(
        "Paris",
        "The best thing to do in Paris is buy a fresh croissant and lounge by the Seine at twilight.",
        ("croissant", "Seine"),
    ),
    "needle_san_francisco": Form(
        "San Francisco",
        "Remember, the best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
        ("sandwich", "Dolores Park"),
    ),
    "needle_new_york": Form(
        "New York",
        "Remember, the best thing to do in New York is grab a bagel and people-watch in Washington Square Park at "
        "golden hour.",
        ("bagel", "Washington Square Park"),
    ),
}
TASKS = (*FORMS, "needle_pass_key")


def make(tokenizer: Any, text: Text, lengths: Sequence[int], depths: int, seed: int) -> list[Prompt]:
    """Each form at each length and depth, answer included. seed: decides the pass keys, and where the text begins."""
    steps = [i / (depths - 1) for i in range(depths)] if depths > 1 else [0.5]
    offset = random.Random(seed).randrange(len(text.body) // 2) if seed else 0
    shifted = Text(text.name, text.body[offset:] + text.body[:offset]) if offset else text
    haystack = Haystack(shifted, tokenizer, max(lengths))
    return [_prompt(haystack, task, length, depth, seed) for length in lengths for task in TASKS for depth in steps]


def _prompt(haystack: Haystack, task: str, length: int, depth: float, seed: int) -> Prompt:
    if task in FORMS:
        form = FORMS[task]
        before, needle, outputs = BEFORE, form.needle, form.outputs
        question = ASK.format(place=form.place)
    else:
        key = draw_key(length, depth, seed)
        before, needle, outputs, question = KEY_BEFORE, NEEDLE.format(key=key), (key,), QUESTION
    own = sum(len(ids) for ids in tokenise(haystack.tokenizer, [before, question]))
    ids = haystack.fill(length - own - NEW_TOKENS - MARGIN, depth, f"\n\n{needle}\n\n")
    return Prompt(
        f"needle/{length}/{task}/{seed}/{depth:.4f}",
        "needle",
        task,
        length,
        before + haystack.tokenizer.decode(ids),
        question,
        "",
        outputs,
        "all",
        NEW_TOKENS,
    )
