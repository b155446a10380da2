"""What a first request would wait for, before it comes: kernels that only prompts, their ends and turns need."""

from __future__ import annotations

import logging

import torch

from coattn.engine.runner.runner import Runner
from coattn.errors import BudgetError

TURNS = 1023, 2048
"""Least tokens of the text that is made up, turn by turn: most lies in DRAM, the second turn more than doubles it, and
multiples of 16 come and other numbers, which compiled kernels tell apart."""
WORDS = 200
"""Tokens that it is made of."""

log = logging.getLogger(__name__)


def rehearse(runner: Runner, longest: int, chunk: int) -> None:
    """Reads a text in two turns, decodes a token after each, and leaves nothing behind but memory that PyTorch keeps.

    longest: tokens that a sequence may have; chunk: of a prompt that are read at once, as the second turn is. Slot 0
    must be free. A method that would learn from this text what it uses for all sequences is left as it is. So is one
    that has no memory for it, in the cache or on the GPU: shorter prompts may be answered all the same.
    """
    runtime, stored = runner.runtime, 0
    if any(group.index.learns() for group in runtime.groups):
        return
    try:
        for turn in (TURNS[0], max(TURNS[1], chunk)):
            until = min(stored + turn, longest - 1)
            while stored < until:
                end = min(stored + chunk, until)
                tokens = [i * i % min(WORDS, runner.session.vocabulary) for i in range(stored, end)]
                logits = runner.extend(0, tokens, stored, end == until)
                stored = end
            if stored < longest:
                runner.decode([0], [1], [stored])
                stored += 1
        assert logits is not None
        logits.softmax(-1).sort(-1)  # for requests that draw
    except (BudgetError, torch.OutOfMemoryError) as error:
        log.info("prompts are not rehearsed: %s", error)
    finally:
        runtime.truncate(0, stored, 0)
    if runner.session.device.type == "cuda":
        torch.cuda.synchronize(runner.session.device)
