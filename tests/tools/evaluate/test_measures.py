import math

import pytest
import torch
from tests.hf.families import FAMILIES, tiny

from coattn.tools.evaluate import fidelity, perplexity
from coattn.tools.evaluate.forced import Forced, force

IDS = torch.randint(3, 160, (90,), generator=torch.Generator().manual_seed(4))


def test_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity.perplexity(torch.full((7,), math.log(50), dtype=torch.float64)) == pytest.approx(50)


def test_kl_is_that_of_the_definition() -> None:
    full, method = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[0.3, 0.2, 0.1]])
    p, q = full.double().softmax(-1), method.double().softmax(-1)
    assert fidelity.kl_divergence(full, method).item() == pytest.approx((p * (p / q).log()).sum().item())
    assert fidelity.kl_divergence(full, full).item() == 0.0


def test_agreement_counts_equal_first_choices() -> None:
    report: dict[str, object] = {}
    full = Forced(2, torch.ones(5), torch.eye(4), report)
    half = Forced(2, torch.ones(5), torch.eye(4)[[0, 1, 3, 2]], report)
    assert fidelity.compare(half, full)["top1"] == 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_losses_equal_the_models_own(family: str) -> None:
    model = tiny(family)
    with torch.no_grad():
        logits = model(IDS[None]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1].float(), IDS[1:], reduction="none")
    forced = force(model, IDS, 60, "full")
    torch.testing.assert_close(forced.losses.float(), losses, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(forced.logits, logits[60:].float(), atol=5e-5, rtol=5e-5)


def test_comparison_splits_the_text_at_the_first_decode_step() -> None:
    own, full = (
        Forced(3, torch.tensor([1.0, 1.0, 1.0, x, x], dtype=torch.float64), torch.eye(3), {}) for x in (2.0, 1.0)
    )
    result = perplexity.summarise([perplexity.window(0, own, full)])
    assert result["tokens"] == 5
    assert result["ratio"] == pytest.approx(math.exp(2 / 5))
    assert result["decode"] == {
        "perplexity": pytest.approx(math.exp(2)),
        "perplexity_full": pytest.approx(math.e),
        "ratio": pytest.approx(math.e),
        "ratio_95": pytest.approx([math.e, math.e]),
        "tokens": 2,
    }


def test_top_5_agreement_is_the_overlap_of_the_two_sets() -> None:
    full, method = torch.arange(10.0)[None].repeat(2, 1), torch.arange(10.0)[None].repeat(2, 1)
    method[1, [0, 1]] += 20.0  # the two least likely tokens become the two most likely
    assert fidelity.overlap(full, method, 5).tolist() == [1.0, 0.6]
    assert fidelity.overlap(full, method, 50).tolist() == [1.0, 1.0]


def test_the_interval_is_that_of_paired_differences() -> None:
    """Mean 0.1, standard deviation 0.2 over four tokens: 0.1 +- 1.96 * 0.2 / 2."""
    x = 0.1 * 3**0.5
    differences = torch.tensor([0.1 - x, 0.1 + x, 0.1 - x, 0.1 + x], dtype=torch.float64)
    low, high = perplexity.interval(differences) or (0.0, 0.0)
    assert (math.log(low), math.log(high)) == pytest.approx((0.1 - 0.196, 0.1 + 0.196), abs=1e-4)
    low, high = perplexity.interval(differences, exact=4) or (0.0, 0.0)
    assert (math.log(low), math.log(high)) == pytest.approx((0.05 - 0.098, 0.05 + 0.098), abs=1e-4)
    assert perplexity.interval(differences[:1]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draws = torch.randn(1000, 200, dtype=torch.float64) * 0.3 + 0.05
    bounds = [perplexity.interval(row) or (0.0, 0.0) for row in draws]
    share = sum(low < math.exp(0.05) < high for low, high in bounds) / 1000
    assert 0.93 < share < 0.97


def test_windows_are_scored_together() -> None:
    one, two = (Forced(3, torch.full((5,), x, dtype=torch.float64), torch.eye(3), {}) for x in (1.0, 2.0))
    result = perplexity.summarise([perplexity.window(0, one, one), perplexity.window(9, two, one)])
    assert result["tokens"] == 10
    assert result["ratio"] == pytest.approx(math.exp(0.5))
    assert result["decode"]["tokens"] == 4


def test_a_lossy_method_is_caught() -> None:
    model = tiny("llama")
    full = force(model, IDS, 60, "full")
    lossy = force(model, IDS, 60, "streaming", sinks=2, recent=6)
    assert fidelity.compare(lossy, full)["kl"] > 1e-3
    assert torch.equal(lossy.losses[:59], full.losses[:59]), "the prefill is exact"
