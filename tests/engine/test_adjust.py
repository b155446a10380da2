"""Penalties, biases, least lengths and guides: each does what it says to its own row and nothing to the others."""

import pytest
import torch
from tests.engine.small import END, VOCAB, Only, greedy, llm, prompt

from coattn import SamplingParams
from coattn.engine.sampling.logits import Adjust, Draws, unpack
from coattn.engine.sampling.sampler import Sampler
from coattn.errors import ConfigError


def test_presence_and_frequency_count_the_answer_alone() -> None:
    x = torch.zeros(2, 6)
    who = [Draws(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [5]), Draws(SamplingParams(), [5])]
    adjust = Adjust(who, 6, x.device)
    assert torch.equal(adjust(x), x), "the prompt does not count"
    for token in (2, 2, 3):
        adjust.note(torch.tensor([token, token]))
    assert adjust(x)[0].tolist() == [0, 0, -1.0, -0.75, 0, 0]
    assert torch.equal(adjust(x)[1], x[1])
    later = Adjust(who[:1], 6, x.device)
    assert later(x[:1])[0, 2] == -1.0, "counts stay with the request when the batch changes"


def test_a_bias_moves_its_tokens() -> None:
    x = torch.zeros(2, 6)
    biased = SamplingParams(logit_bias={1: 100, 4: -2.5})
    got = Adjust([Draws(SamplingParams(), []), Draws(biased, [])], 6, x.device)(x)
    assert got.tolist() == [[0] * 6, [0, 100, 0, 0, -2.5, 0]]
    assert [each.token for each in Sampler().draw(x, [Draws(biased, [])] * 2)] == [1, 1]


def test_bits_become_tokens() -> None:
    bits = torch.tensor([[0b101, 1 << 31 >> 31], [-1, 0]], dtype=torch.int32)
    allowed = unpack(bits, 40)
    assert allowed[0].nonzero()[:, 0].tolist() == [0, 2, 32]
    assert allowed[1].sum() == 32
    assert not unpack(bits[:, :1], 40)[1, 32:].any(), "tokens that the bits do not reach may not come"


BIASES: list[tuple[object, str]] = [({-1: 3}, "-1"), ({"a": 3}, "'a'"), ({3: 101}, "token 3"), (7, "mapping")]


@pytest.mark.parametrize(("bias", "said"), BIASES)
def test_biases_that_are_none_are_refused(bias: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingParams(logit_bias=bias)  # type: ignore[arg-type]


def test_an_answer_has_its_least_length() -> None:
    eager = {END: 100.0}
    with llm() as engine:
        plain = engine.generate(prompt(9), greedy(20, logit_bias=eager))[0]
        assert (plain.new_tokens, plain.finish_reason) == (1, "stop")
        held = engine.generate(prompt(9), greedy(20, logit_bias=eager, min_new_tokens=7))[0]
        assert (held.new_tokens, held.finish_reason) == (8, "stop"), "the end token is the eighth"
        assert END not in held.token_ids[:7]
        free = engine.generate(prompt(9), greedy(20, ignore_eos=True))[0]
        stop = free.text[0]
        assert engine.generate(prompt(9), greedy(20, ignore_eos=True, stop=(stop,)))[0].text == ""
        late = engine.generate(prompt(9), greedy(20, ignore_eos=True, stop=(stop,), min_new_tokens=5))[0]
        assert late.new_tokens >= 5
        assert late.text.startswith(stop)
        with pytest.raises(ConfigError, match="260"):
            engine.generate(prompt(9), greedy(2, logit_bias={VOCAB: 1}))
        with pytest.raises(ConfigError, match="max_new_tokens"):
            greedy(8, min_new_tokens=9)


def test_a_guide_decides_and_the_others_do_not_notice() -> None:
    with llm() as engine:
        want = engine.generate(prompt(12), greedy(12))[0].token_ids
        guided = engine.submit(prompt(9), SamplingParams(temperature=1.0, seed=1), guide=Only(list(b"yes, I do")))
        other = engine.submit(prompt(12), greedy(12))
        assert guided.result().text == "yes, I do"
        assert guided.result().finish_reason == "stop"
        assert other.result().token_ids == want
        with pytest.raises(ConfigError, match="guide"):
            engine.submit(prompt(9), greedy(5, ignore_eos=True), guide=Only([1]))


def test_a_guide_that_fails_takes_down_its_own_request_alone() -> None:
    class Broken(Only):
        def mask(self) -> torch.Tensor:
            if self.at == 2:
                raise ValueError("no way on")
            return super().mask()

    with llm() as engine:
        want = engine.generate(prompt(12), greedy(12))[0].token_ids
        guided = engine.submit(prompt(9), greedy(9), guide=Broken(list(b"yes, I do")))
        other = engine.submit(prompt(12), greedy(12))
        assert other.result().token_ids == want
        assert guided.result().token_ids == tuple(b"ye")
        assert "no way on" in str(guided.result().error)
        assert engine.report()["failed_steps"] == 0
