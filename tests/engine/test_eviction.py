"""What is given up first when sequences are short of blocks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.rows import options
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn

UNIT = 8 * 1 * 2 * 2 * 8 * 4
"""Bytes of a block of 8 tokens: one layer, keys and values, two KV heads of 8 float32 numbers."""


@pytest.mark.parametrize("session_first", [True, False])
def test_sessions_and_prefixes_are_given_up_in_one_order(session_first: bool) -> None:
    """Whichever of the two was used longer ago makes room for a third text."""
    given: dict[str, Any] = {"max_batch": 2, "max_length": 112, "chunk": 24, **options("full"), "gpu_kv": 16 * UNIT}
    text, params = prompt(40, seed=2), greedy(4, ignore_eos=True)
    with coattn.LLM((small(1), tokenizer()), "full", **given) as llm, llm.session() as session:
        asks = [lambda: session.ask(prompt(40, seed=1), params), lambda: llm.generate(text, params)]
        for ask in asks if session_first else reversed(asks):
            ask()
        llm.generate(prompt(50, seed=3), params)
        assert llm.report()["sequences_moved"] == session_first
