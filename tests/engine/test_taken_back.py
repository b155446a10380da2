"""Turns that take back a part of what is stored, and prompts that give way: the answer is that of the text alone."""

from typing import Any

import pytest
from tests.engine.faults import DEVICE, PARAMS, compare, ids
from tests.engine.rows import options
from tests.hf.families import tiny

import coattn
from coattn.engine.request import RequestOutput


def answer(family: str, method: str, tokens: list[int], **more: Any) -> RequestOutput:
    """Of a text that nobody has read before."""
    with opened(family, method, reuse=False, **more) as llm:
        return llm.generate(tokens, PARAMS)[0]


def opened(family: str, method: str, **more: Any) -> coattn.LLM:
    given = {"max_batch": 2, "max_length": 160, "chunk": 24, **options(method), **more}
    return coattn.LLM((tiny(family, DEVICE), None), method, **given)


@pytest.mark.parametrize("kept", [104, 88, 50, 8])
@pytest.mark.parametrize("method", ["full", "cpu"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral_sliding", "llama"])
def test_a_turn_that_takes_tokens_back(family: str, method: str, kept: int) -> None:
    with opened(family, method) as llm:
        session = llm.session()
        session.ask(ids(103, 1), PARAMS)
        stored = session.tokens
        assert len(stored) == 111
        tokens = [*stored[:kept], *ids(15, 2)]
        found = session.submit_whole(tokens, PARAMS).result()
    assert found.cached_tokens == (kept // 8 * 8 if family == "llama" else 0), (
        "a window that was written over is read again"
    )
    assert not compare(found, answer(family, method, tokens), may_fail=False)


def test_a_window_that_is_not_full_goes_back() -> None:
    with opened("gemma3", "full") as llm:
        session = llm.session()
        session.ask(ids(9, 1), PARAMS)
        tokens = [*session.tokens[:8], *ids(30, 2)]
        found = session.submit_whole(tokens, PARAMS).result()
    assert found.cached_tokens == 8
    assert not compare(found, answer("gemma3", "full", tokens), may_fail=False)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize(("method", "family"), [("hcattention", "llama"), ("hgca", "gemma3"), ("full", "gemma3")])
def test_a_prompt_that_gives_way_while_it_is_read(method: str, family: str, after: int) -> None:
    tokens = ids(90, 3)
    with opened(family, method) as llm:
        llm.generate(ids(20, 4), PARAMS)  # a codebook is made of the first prompt
        older = llm.submit(ids(20, 5), coattn.SamplingParams(max_new_tokens=40, ignore_eos=True))
        handle = llm.submit(tokens, PARAMS)
        while not handle.request.stored:
            llm.step()
        for _ in range(after - 1):
            llm.step()
        with llm.engine.paused():
            assert llm.engine.scheduler.preempt()
        assert handle.request.slot is None
        found = handle.result()
        older.cancel()
    assert found.preemptions == 1
    with opened(family, method, reuse=False) as llm:
        llm.generate(ids(20, 4), PARAMS)
        want = llm.generate(tokens, PARAMS)[0]
    assert not compare(found, want, may_fail=False)
