"""HCAttention under `attach` and `LLM`: batches of mixed lengths, appended turns, tight budgets."""

from typing import Any

import pytest
import torch
from tests.engine.small import greedy, llm, prompt, small

import coattn

pytestmark = pytest.mark.slow

LOSSY = {"groups": 4, "centroids": 64, "tau": 0.9}
LENGTHS = [3, 40, 17, 70, 1, 33, 8, 100]


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    """With a codebook that is there before: one made from the first prompt would depend on who came first."""
    ids = [prompt(n, seed=1) for n in LENGTHS]
    with llm("hcattention", max_batch=1, **LOSSY) as engine:
        alone = []
        for each in ids:
            engine.generate(prompt(90, seed=9), greedy(1))  # makes the codebook
            alone.append(engine.generate(each, greedy(20))[0].token_ids)
    with llm("hcattention", **LOSSY) as engine:
        engine.generate(prompt(90, seed=9), greedy(1))
        together = [each.token_ids for each in engine.generate(ids, greedy(20))]
    assert together == alone


def test_preemption_under_tight_budgets_changes_no_text() -> None:
    ids = [prompt(n, seed=3) for n in (20, 30, 25, 10, 35)]
    params = [greedy(90, ignore_eos=True)] * len(ids)
    exact = {"max_batch": 5, "groups": 0, "tau": 1}
    with llm("hcattention", **exact) as roomy:
        want = [each.token_ids for each in roomy.generate(ids, params)]
        token = {tier: count // 256 for tier, count in roomy.engine.runner.runtime.bytes_for(256).items()}
        window = roomy.ledger.held["gpu"] - 5 * 256 * token["gpu"]
    read = 256 * 2 * token["host"]  # keys and values of one prompt, where GPU memory has no room for them
    for tight in ({"gpu_kv": window + 300 * token["gpu"]}, {"host_kv": 300 * token["host"] + read}):
        with llm("hcattention", **exact, **tight) as engine:
            got = engine.generate(ids, params)
            assert engine.report()["preemptions"] > 0
            tier = "gpu" if "gpu_kv" in tight else "host"
            assert engine.ledger.peak[tier] <= tight[f"{tier}_kv"]
        assert [each.token_ids for each in got] == want


@torch.no_grad()
def turns(method: str, **params: Any) -> torch.Tensor:
    """Logits of two sequences over a prompt, decode steps, another turn and decode steps again."""
    model, draws, kept = small(), torch.Generator().manual_seed(4), []
    with coattn.attach(model, method, **params) as attachment:
        past = attachment.new_cache()
        for columns in (60, *[1] * 12, 20, *[1] * 12):
            ids = torch.randint(0, 250, (2, columns), generator=draws)
            kept.append(model(ids.to(model.device), past_key_values=past, use_cache=True).logits.flatten(0, 1))
    return torch.cat(kept).cpu()


def test_loss_grows_as_codes_and_mass_shrink() -> None:
    full = turns("full").log_softmax(-1)

    def kl(**params: Any) -> float:
        own = turns("hcattention", block=8, **params).log_softmax(-1)
        return float((full.exp() * (full - own)).sum(-1).mean())

    fine, coarse = kl(groups=4, centroids=256, tau=1), kl(groups=2, centroids=4, tau=1)
    much, little = kl(groups=0, tau=0.95), kl(groups=0, tau=0.5)
    assert 0 < fine < coarse
    assert 0 < much < little
