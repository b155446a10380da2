"""Sampling equals Transformers' processors, row by row, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from coattn.engine.sampling.filters import PREFIXES, drop_unlikely, keep_top, penalise, pick
from coattn.engine.sampling.logits import Draws
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.sampling.sampler import Sampler

VOCABS = (50, 500, 2 * PREFIXES[1] + 500, 2 * PREFIXES[-1] + 500)
"""One that is sorted whole, and some whose most likely tokens are looked at first."""


def scores(rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab) * spread


def column(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def draws(*params: SamplingParams) -> list[Draws]:
    return [Draws(each, [1, 2, 3]) for each in params]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_k_and_top_p(vocab: int, spread: float) -> None:
    ks, ps = [0, 1, 7, 40, 0, 0, 30, 0, vocab + 9, 1500], [1.0, 1.0, 1.0, 0.9, 0.9, 0.3, 0.5, 0.999, 0.8, 0.7]
    x = scores(len(ks), vocab, spread)
    ours = keep_top(x, column(ks), column(ps))
    for row, (k, p) in enumerate(zip(ks, ps, strict=True)):
        want = x[row : row + 1]
        if k:
            want = theirs.TopKLogitsWarper(k)(None, want)
        if p < 1:
            want = theirs.TopPLogitsWarper(p)(None, want)
        assert torch.equal(ours[row], want[0]), (k, p)


def test_ties_with_the_last_kept_token_stay_as_in_transformers() -> None:
    x = torch.zeros(1, VOCABS[2])
    x[0, :20] = 1.0
    x[0, 20:1200] = 0.5
    for k in (5, 20, 25, 1100):
        assert torch.equal(keep_top(x, column([k]), column([1.0])), theirs.TopKLogitsWarper(k)(None, x)), k


def test_min_p() -> None:
    x, shares = scores(4, 50), [0.0, 0.05, 0.5, 1.0]
    ours = drop_unlikely(x.softmax(-1), column(shares))
    for row, share in enumerate(shares):
        want = theirs.MinPLogitsWarper(share)(None, x[row : row + 1])
        assert torch.equal(ours[row] > 0, want[0] > -torch.inf)


def test_repetition_penalty() -> None:
    x, penalties = scores(3, 50), [1.0, 1.3, 0.7]
    ids = torch.randint(0, 50, (3, 9))
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, ids, True)
    ours = penalise(x, seen, column(penalties))
    for row, penalty in enumerate(penalties):
        want = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids[row : row + 1], x[row : row + 1].clone())
        torch.testing.assert_close(ours[row], want[0])


def test_pick_follows_the_running_sum() -> None:
    shares = torch.rand(3, 1300) * (torch.rand(3, 1300) > 0.5)
    ends = shares.double().cumsum(-1)
    numbers = torch.linspace(0, 1 - 2**-53, 999, dtype=torch.float64)
    for row in range(3):
        got = pick(shares[row].expand(999, -1), numbers)
        assert (shares[row][got] > 0).all()
        before, after = ends[row][got] - shares[row][got], ends[row][got]
        mark, slack = numbers * ends[row, -1], 1e-9
        assert ((before - slack <= mark) & (mark <= after + slack)).all()
        assert got[0] == shares[row].nonzero()[0, 0]
        assert got[-1] == shares[row].nonzero()[-1, 0]


def test_greedy_takes_the_first_of_the_largest() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert [each.token for each in Sampler().draw(x, draws(SamplingParams(), SamplingParams()))] == [1, 0]


def test_known_tokens_are_used_by_plain_greedy_batches_only() -> None:
    x, plain = scores(2, 50), SamplingParams()
    got = Sampler().draw(x, draws(plain, plain), best=[7, -1])
    assert [(each.token, each.finite) for each in got] == [(7, True), (-1, False)]
    for other in (SamplingParams(logprobs=0), SamplingParams(repetition_penalty=1.1), SamplingParams(temperature=1.0)):
        got = Sampler().draw(x, draws(plain, other), best=[7, 8])
        assert got[0].token == int(x[0].argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype: torch.dtype) -> None:
    x = scores(2, 50).to(dtype)
    got = Sampler().draw(x, draws(SamplingParams(), SamplingParams(temperature=1e-9)))
    assert got[0].token == int(x[0].argmax())
    assert x[1, got[1].token] == x[1].max()


def test_samples_follow_the_filtered_distribution() -> None:
    """Every setting at once, against Transformers' processors in their order; 20,000 draws."""
    x, n = scores(1, 12, 1.0), 20_000
    params = SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.4)
    want = theirs.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 3]]), x.clone())
    for warper in (
        theirs.TemperatureLogitsWarper(1.5),
        theirs.TopKLogitsWarper(9),
        theirs.TopPLogitsWarper(0.9),
        theirs.MinPLogitsWarper(0.1),
    ):
        want = warper(None, want)
    expected = want.softmax(-1)[0].double()
    got = Sampler().draw(x.expand(n, -1), draws(*[SamplingParams(**{**params.__dict__, "seed": i}) for i in range(n)]))
    counts = torch.bincount(torch.tensor([each.token for each in got]), minlength=12).double()
    assert (counts[expected == 0] == 0).all(), "a dropped token was drawn"
    kept = expected > 0
    chi = ((counts - n * expected)[kept] ** 2 / (n * expected)[kept]).sum().item()
    assert chi < 35, "more than five standard deviations from what is expected"


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    mine = SamplingParams(temperature=0.9, seed=7)
    others = [
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=5, seed=1),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.2, repetition_penalty=2.0),
    ]
    steps = [scores(5, VOCABS[2], 1.0) for _ in range(30)]

    def run(company: list[SamplingParams]) -> list[int]:
        who, sampler, found = draws(mine, *company), Sampler(), []
        for i, step in enumerate(steps):
            present = who if i % 3 else who[:1]
            found.append(sampler.draw(step[: len(present)], present)[0].token)
        return found

    alone = run([])
    assert run(others) == alone
    assert run(others[2:]) == alone
    assert len(set(alone)) > 20


def test_the_penalty_remembers_what_was_drawn_when_the_batch_changes() -> None:
    greedy = SamplingParams(repetition_penalty=1e6)
    first, second = draws(greedy, greedy)
    x = torch.arange(10.0, 20.0)[None]
    sampler, found = Sampler(), []
    for i in range(5):
        who = [first, second] if i == 2 else [first]
        found.append(sampler.draw(x.expand(len(who), -1), who)[0].token)
    assert found == [9, 8, 7, 6, 5]
    assert sampler.draw(x, [second])[0].token == 8


def test_log_probabilities_are_the_models_own() -> None:
    x = scores(3, 50)
    params = [SamplingParams(logprobs=0), SamplingParams(logprobs=4, temperature=0.1, top_k=1), SamplingParams()]
    got = Sampler().draw(x, draws(*params))
    want = x.double().log_softmax(-1)
    assert got[2].logprobs is None
    for row in (0, 1):
        assert got[row].logprobs.logprob == pytest.approx(want[row, got[row].token].item(), abs=1e-5)
    assert got[0].logprobs.top == ()
    everything = Sampler().draw(x[:1], draws(SamplingParams(logprobs=99)))[0].logprobs
    assert len(everything.top) == 50
    assert sum(torch.tensor([p for _, p in everything.top]).exp()).item() == pytest.approx(1, abs=1e-4)
    best = want[1].topk(4)
    assert [i for i, _ in got[1].logprobs.top] == best.indices.tolist()
    assert [p for _, p in got[1].logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_noticed(bad: float) -> None:
    x = scores(3, 50)
    x[1, 3] = bad
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    assert [each.finite for each in Sampler().draw(x, draws(*[params] * 3))] == [True, False, True]
    assert [each.finite for each in Sampler().draw(x, draws(*[SamplingParams()] * 3))] == [True, False, True]
