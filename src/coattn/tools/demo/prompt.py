"""What is read and asked: a real document with a fact in it, and a question about the fact."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.hf.load import Loaded
from coattn.text import default_text
from coattn.tools.evaluate.haystack import Haystack, check_length, frame, tokenise

FACT = "Remember this: the access code of the northern lighthouse is 58213."
QUESTION = "What is the access code of the northern lighthouse? Answer with the number."
ANSWER = "58213"
DEPTH = 0.4
"""How far into the document the fact stands."""


class Planted(NamedTuple):
    """ids `[tokens]`: document, fact and question as the model reads them; the fact is `ids[start:end]`."""

    ids: Tensor
    start: int
    end: int


def plant(loaded: Loaded, tokens: int, answer: int) -> Planted:
    """A prompt of exactly so many tokens, in the model's chat template. answer: tokens that must fit behind it."""
    check_length(loaded.name, loaded.positions, tokens, answer)
    tokenizer = loaded.tokenizer
    first, last = frame(tokenizer, "", f"\n\n{QUESTION}")
    fact = f"\n\n{FACT}\n\n"
    straw = Haystack(default_text(), tokenizer, tokens).fill(tokens - len(first) - len(last), DEPTH, fact)
    ids, planted = first + straw + last, tokenise(tokenizer, [fact])[0]
    start = next(i for i in range(len(ids)) if ids[i : i + len(planted)] == planted)
    return Planted(torch.tensor(ids), start, start + len(planted))
