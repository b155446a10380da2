"""What a first request would wait for, before it comes: kernels that only prompts, their ends and turns need."""

from __future__ import annotations

import logging

import torch

from coattn.engine.runner.runner import Runner
from coattn.errors import BudgetError

TOKENS, CHUNK = 3071, 2048
"""Of the text that is made up, and of a chunk of it: most lies in DRAM, and multiples of 16 and other numbers come,
between which compiled kernels distinguish."""
WORDS = 200
"""Tokens that it is made of."""

log = logging.getLogger(__name__)


def rehearse(runner: Runner, longest: int) -> None:
    """Reads a text, decodes a token, cuts the text in half, goes on from there, and leaves nothing behind.

    longest: tokens that a sequence may have. Slot 0 must be free. A method that would learn from this text what it uses
    for all sequences is left as it is. So is one that has no memory for it.
    """
    runtime, length = runner.runtime, min(TOKENS, longest - 1)
    if length < 2 or any(group.index.learns() for group in runtime.groups):
        return
    tokens, stored = [i * i % min(WORDS, runner.session.vocabulary) for i in range(length)], 0
    try:
        for turn in range(2):
            for start in range(stored, length, CHUNK):
                end = min(start + CHUNK, length)
                stored = end
                logits = runner.extend(0, tokens[start:end], start, end == length)
            runner.decode([0], tokens[:1], [length])
            stored = length + 1
            if not turn:
                runtime.truncate(0, stored, length // 2)
                stored = length // 2
        assert logits is not None
        logits.softmax(-1).sort(-1)  # for requests that draw
    except BudgetError as error:
        log.info("prompts are not rehearsed: %s", error)
    finally:
        runtime.truncate(0, stored, 0)
    if runner.session.device.type == "cuda":
        torch.cuda.synchronize(runner.session.device)
