"""Log-probabilities of a prompt's own tokens: those of Transformers' forward call, however the prompt is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.small import VOCAB, by_transformers, greedy, llm, prompt, small

import coattn
from coattn import SamplingParams
from coattn.engine.request import RequestOutput, TokenLogprobs
from coattn.errors import ConfigError


@torch.no_grad()
def reference(ids: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]`: after each token."""
    model = small()
    logits = model(torch.tensor([ids], device=model.device)).logits[0]
    return logits.float().log_softmax(-1).cpu()


def check(output: RequestOutput, ids: list[int], top: int) -> None:
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    want = reference(ids)
    for i, each in enumerate(found[1:], 1):
        assert isinstance(each, TokenLogprobs)
        assert each.logprob == pytest.approx(float(want[i - 1, ids[i]]), abs=2e-5)
        best = want[i - 1].topk(top)
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=2e-5)
        assert len({token for token, _ in each.top}) == top


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
@pytest.mark.parametrize("chunk", [1, 7, 32, 128])
def test_as_transformers_has_them_however_the_prompt_is_cut(method: str, chunk: int) -> None:
    ids = prompt(70)
    with llm(method, chunk=chunk) as engine:
        got = engine.generate([ids], greedy(3, prompt_logprobs=4))[0]
        check(got, ids, 4)
        assert got.token_ids == by_transformers(small(), ids, 3)


def test_what_is_stored_is_read_again_and_nobody_else_is_changed() -> None:
    ids = prompt(70)
    with llm(chunk=16) as engine:
        plain = engine.generate([ids], greedy(4))[0]
        wanted = [greedy(4), greedy(4, prompt_logprobs=0), greedy(4, prompt_logprobs=2), greedy(4)]
        several = engine.generate([ids, ids, ids[:33], ids], wanted)
        assert [each.cached_tokens > 0 for each in several] == [True, False, False, True]
        assert [each.prompt_logprobs is None for each in several] == [True, False, False, True]
        check(several[1], ids, 0)
        check(several[2], ids[:33], 2)
        assert several[0].token_ids == several[1].token_ids == several[3].token_ids == plain.token_ids
        assert engine.generate([ids[:1]], greedy(1, prompt_logprobs=1))[0].prompt_logprobs == (None,)
        parts = list(engine.stream(ids, greedy(3, prompt_logprobs=1)))
        check(parts[0], ids, 1)


def test_a_step_that_fails_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(60)
    with llm(chunk=16) as engine:
        other = engine.submit(prompt(20, seed=1), greedy(30, ignore_eos=True))
        while not other.new_tokens:
            engine.step()
        commit, failures = engine.runner.runtime.commit, [True]

        def broken(*given: Any) -> None:
            if failures:
                failures.pop()
                raise RuntimeError("once")
            commit(*given)

        monkeypatch.setattr(engine.runner.runtime, "commit", broken)
        got = engine.submit(ids, greedy(2, prompt_logprobs=1)).result()
        assert (other.result().finish_reason, got.finish_reason, failures) == ("length", "length", [])
        check(got, ids, 1)


def test_who_loses_its_memory_keeps_what_was_heard() -> None:
    with llm(gpu_kv=28 * 8 * 256, max_batch=2, chunk=16) as engine:  # 28 blocks of eight tokens
        texts = [prompt(40, seed=i) for i in range(2)]
        found = engine.generate(texts, greedy(120, prompt_logprobs=1, ignore_eos=True))
        assert sum(each.preemptions for each in found) > 0
        for each, ids in zip(found, texts, strict=True):
            check(each, ids, 1)


def test_what_cannot_be_scored() -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)
    with llm() as engine:
        with pytest.raises(ConfigError, match=f"prompt_logprobs is {VOCAB + 1}"):
            engine.submit([1], greedy(1, prompt_logprobs=VOCAB + 1))
        session = engine.session()
        with pytest.raises(ConfigError, match="not a session's"):
            session.submit([1, 2], greedy(1, prompt_logprobs=1))
    assert coattn.SamplingParams(prompt_logprobs=0).prompt_logprobs == 0
