"""Tokens that are fed one step each: under full attention the answer is that of the whole prompt."""

from dataclasses import replace

import pytest
import torch
from tests.engine.small import Only, greedy, llm, prompt, small

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


@pytest.mark.parametrize("count", [2, 5, 9])
def test_a_stream_has_the_log_probabilities_of_the_answer(count: int) -> None:
    asked = greedy(6, feed=WHOLE[-count:], logprobs=2)
    with llm(reuse=False) as engine:
        whole = engine.generate(WHOLE[:-count], asked)[0]
        parts = list(engine.stream(WHOLE[:-count], asked))
    assert len(whole.logprobs) == 6
    for part in parts:
        assert len(part.logprobs or ()) == len(part.token_ids)
    assert sum((part.logprobs or () for part in parts), ()) == whole.logprobs


@pytest.mark.parametrize("asked", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.5}])
def test_penalties_count_neither_fed_tokens_nor_what_was_drawn_in_their_place(asked: dict[str, float]) -> None:
    """They count the answer alone, so fed tokens weigh as those of a prompt."""
    with llm(reuse=False) as engine:
        for seed in range(8):
            ids = prompt(30, seed=seed)
            read = engine.generate(ids, greedy(12, ignore_eos=True, **asked))[0]
            fed = engine.generate(ids[:20], greedy(12, ignore_eos=True, feed=ids[20:], **asked))[0]
            assert fed.token_ids == read.token_ids


def test_the_least_length_and_random_numbers_are_those_of_the_answer_alone() -> None:
    with llm(reuse=False) as engine:
        eager = greedy(20, logit_bias={256: 100.0}, min_new_tokens=5, feed=WHOLE[SPLIT:])
        assert engine.generate(WHOLE[:SPLIT], eager)[0].new_tokens == 6, "the end token is the sixth"
        drawn = {"max_new_tokens": 8, "temperature": 1.0, "seed": 7}
        read = engine.generate(WHOLE, SamplingParams(**drawn))[0]
        fed = engine.generate(WHOLE[:SPLIT], SamplingParams(**drawn, feed=WHOLE[SPLIT:]))[0]
        assert fed.token_ids == read.token_ids
        plain = engine.generate(WHOLE, greedy(20, ignore_eos=True))[0]
        late = greedy(20, ignore_eos=True, stop=(plain.text[:2],), min_new_tokens=6)
        assert engine.generate(WHOLE, late)[0].new_tokens == 20
        found = engine.generate(WHOLE[:SPLIT], replace(late, feed=WHOLE[SPLIT:]))[0]
        assert found.new_tokens == 20, "no stop string counts before the sixth token of the answer"


def test_a_guide_knows_the_answer_alone() -> None:
    class Asked(Only):
        times = 0

        def mask(self) -> torch.Tensor:
            self.times += 1
            return super().mask()

    guide = Asked(list(b"yes, "))
    with llm() as engine:
        found = engine.submit(WHOLE[:SPLIT], greedy(9, feed=WHOLE[SPLIT:]), guide=guide).result()
    assert found.text == "yes, "
    assert (guide.times, guide.at) == (6, 6), "five letters and the end, and none of those that were fed"
