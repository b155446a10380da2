"""Tokens that are fed one step each: under full attention the answer is that of the whole prompt."""

from __future__ import annotations

import pytest
from tests.engine.small import greedy, llm, prompt, small

from coattn import SamplingParams
from coattn.errors import ConfigError, InputError
from coattn.hf.prefilled import prefill, prefill_ends

WHOLE = prompt(60, seed=3)
SPLIT = 41


def test_under_full_attention_feeding_is_reading() -> None:
    with llm(reuse=False) as engine:
        read = engine.generate(WHOLE, greedy(10))[0]
        steps = engine.report()["decode_steps"]
        fed = engine.generate(WHOLE[:SPLIT], greedy(10, feed=WHOLE[SPLIT:]))[0]
        report = engine.report()
    assert fed.token_ids == read.token_ids
    assert fed.text == read.text
    assert (fed.new_tokens, fed.prompt_tokens) == (10, SPLIT)
    assert report["decode_steps"] - steps == len(WHOLE) - SPLIT + 9
    assert report["new_tokens"] == 20


def test_a_window_forgets_what_it_was_not_asked_yet() -> None:
    """The method has its say in every fed token: under a small window the two are not the same."""
    with llm("streaming", sinks=8, recent=8, chunk=128) as engine:
        read = engine.generate(WHOLE, greedy(10))[0]
        fed = engine.generate(WHOLE[:SPLIT], greedy(10, feed=WHOLE[SPLIT:]))[0]
    assert fed.token_ids != read.token_ids


def test_fed_and_other_requests_share_a_batch_and_a_stream_shows_the_answer_alone() -> None:
    with llm() as engine:
        alone = engine.generate(WHOLE[:SPLIT], greedy(6, feed=WHOLE[SPLIT:]))[0]
        both = engine.generate([WHOLE[:SPLIT], prompt(20)], [greedy(6, feed=WHOLE[SPLIT:]), greedy(6)])
        parts = list(engine.stream(WHOLE[:SPLIT], greedy(6, feed=WHOLE[SPLIT:])))
    assert both[0].token_ids == alone.token_ids
    assert sum((part.token_ids for part in parts), ()) == alone.token_ids
    assert "".join(part.text for part in parts) == alone.text


def test_the_end_token_may_be_fed() -> None:
    with llm() as engine:
        found = engine.generate(WHOLE[:SPLIT], greedy(3, feed=(256, 5), ignore_eos=False))[0]
    assert found.new_tokens >= 1


def test_what_cannot_be_fed_is_refused() -> None:
    for wrong in ("a", (-1,), 1.5, (True,)):
        with pytest.raises(ConfigError, match="feed is"):
            SamplingParams(feed=wrong)
    with pytest.raises(ConfigError, match="do not go together"):
        SamplingParams(feed=(1,), repetition_penalty=1.2)
    with llm() as engine, pytest.raises(InputError, match="at most 256"):
        engine.generate(prompt(200), greedy(4, feed=prompt(60)))


def test_a_beginning_of_a_prompt_is_what_reading_it_alone_gives() -> None:
    import torch

    model = small()
    for chunk in (7, 32, 64):
        whole, part = prefill_ends(model, WHOLE, (len(WHOLE), SPLIT), chunk)
        for made, ids in ((whole, WHOLE), (part, WHOLE[:SPLIT])):
            alone = prefill(model, ids, chunk)
            assert made.tokens == alone.tokens
            assert made.fault() is None
            torch.testing.assert_close(made.logits, alone.logits, rtol=1e-4, atol=1e-4)
            for own, other in zip((*made.kv, *made.queries), (*alone.kv, *alone.queries), strict=True):
                for a, b in zip(own, other, strict=True) if isinstance(own, tuple) else ((own, other),):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert part.kv[0][0].data_ptr() == whole.kv[0][0].data_ptr()  # no second copy
    with pytest.raises(InputError, match="ends is"):
        prefill_ends(model, WHOLE, (0,))


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="sizes"):
        llm(sizes=(5,), max_batch=4)
