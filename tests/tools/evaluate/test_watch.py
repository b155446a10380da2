"""What the probe says against hand computations, and the protocol over several windows."""

from typing import Any

import pytest
import torch
from tests.dense import dense
from tests.hf.families import tiny
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import InputError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.tools.evaluate import fidelity
from coattn.tools.evaluate.fidelity import MEASURES
from coattn.tools.evaluate.forced import force
from coattn.tools.evaluate.paired import Comparison
from coattn.tools.evaluate.watch import Fidelity
from coattn.tools.evaluate.windows import choose
from coattn.types import LayerShape, Step

IDS = torch.randint(3, 160, (150,), generator=torch.Generator().manual_seed(4))
WINDOWS = choose(150, decode=6, prefill=50, stride=40)


def watched(method: str, **params: Any) -> tuple[dict[str, float], Tensor, Tensor, Tensor]:
    """Measures of one decode step after 30 tokens, its query, all keys and values; one layer, two groups of two."""
    torch.manual_seed(2)
    shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
    probe = Fidelity()
    runtime = Runtime([shape], compose(METHODS[method], **params), Ledger(), 1, None, probes=[probe])
    q, k, v = (torch.randn(31, heads, 16) for heads in (4, 2, 2))
    for start, end in ((0, 30), (30, 31)):
        running = runtime.begin(Step.of((0,), (start,), (end - start,)))
        runtime.attend(running, 0, q[start:end], k[start:end], v[start:end], 0.4)
        runtime.commit(running)
    return dict(zip(MEASURES, probe.measures()[0, 0, 0].tolist(), strict=True)), q[30], k, v


def test_the_measures_are_those_of_their_definitions() -> None:
    found, q, k, v = watched("streaming", sinks=3, recent=7)
    kept = torch.tensor([0, 1, 2, *range(24, 31)])
    weights = torch.einsum("hd,nhd->hn", q.double(), k.double().repeat_interleave(2, 1)).mul(0.4).softmax(-1)
    assert found["mass"] == pytest.approx(weights[:, kept].sum(-1).mean().item(), abs=1e-6)
    own, exact = dense(q[None], k[kept], v[kept], 0.4)[0], dense(q[None], k, v, 0.4)[0]
    cosine = (own * exact).sum(-1) / (own.norm(dim=-1) * exact.norm(dim=-1))
    assert found["cosine"] == pytest.approx(cosine.mean().item(), abs=1e-6)
    assert found["share_attended"] == 10 / 31
    assert found["cpu_ratio"] == 0.0


def test_what_the_cpu_attends_to_counts_and_what_the_gpu_pulls_does_not() -> None:
    found = watched("cpu", block=8)[0]
    # 31 tokens in blocks of 8: the newest block, of 7 tokens, is on the GPU
    assert found["cpu_ratio"] == 24 / 31
    assert found["share_attended"] == 1.0
    assert found["mass"] == pytest.approx(1.0, abs=1e-6)
    assert watched("offload", block=8)[0]["cpu_ratio"] == 0.0


def compare(method: str, batch: int = 2, **params: Any) -> dict[str, Any]:
    probe = Fidelity()
    comparison = Comparison(tiny("llama"), compose(METHODS[method], **params), probe=probe)
    pairs = [*comparison.pairs(IDS, WINDOWS, batch)]
    assert [pair.start for pair in pairs] == [0, 40, 80]
    parts = [fidelity.window(*pair, measures) for pair, measures in zip(pairs, probe.measures(), strict=True)]
    return fidelity.summarise(parts)


def test_a_method_stands_between_random_and_the_oracle() -> None:
    budget = 16
    floor, ceiling = compare("random", budget=budget), compare("oracle", budget=budget)
    method = compare("streaming", sinks=2, recent=budget - 2)
    for found in (floor, method, ceiling):
        assert found["share_attended"] == pytest.approx(sum(budget / n for n in range(51, 57)) / 6)
    assert ceiling["mass"] > max(floor["mass"], method["mass"])
    assert ceiling["kl"] < min(floor["kl"], method["kl"])
    assert len(ceiling["layers"]["mass"]) == tiny("llama").config.num_hidden_layers


def test_windows_in_one_batch_are_the_same_as_one_by_one() -> None:
    one, many = (compare("streaming", batch=batch, sinks=2, recent=14) for batch in (1, 3))
    layers, intervals = ([found.pop(name) for found in (one, many)] for name in ("layers", "kl_95"))
    assert one == pytest.approx(many, abs=1e-5)
    assert intervals[0] == pytest.approx(intervals[1], abs=1e-5)
    assert layers[0]["mass"] == pytest.approx(layers[1]["mass"], abs=1e-5)


def test_a_window_is_forced_as_if_it_were_the_text() -> None:
    model, cut = tiny("qwen3"), WINDOWS.of(IDS)
    both = force(model, cut, 50, "full")
    assert both.losses.shape == (3, 55)
    assert both.logits.shape[:2] == (3, 6)
    for window, own in zip(cut, both.windows(), strict=True):
        alone = force(model, window, 50, "full")
        torch.testing.assert_close(own.losses, alone.losses, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.logits, alone.logits, atol=1e-4, rtol=1e-4)


def test_a_budget_is_for_one_window() -> None:
    streaming = compose(METHODS["streaming"])
    assert Comparison(tiny("llama"), streaming, gpu_kv="64KiB").batch(4) == 1
    assert Comparison(tiny("llama"), streaming).batch(4) == 4


def test_sliding_layers_are_exact_under_every_method() -> None:
    probe = Fidelity()
    comparison = Comparison(tiny("gemma2"), compose(METHODS["streaming"], sinks=2, recent=6), probe=probe)
    assert len([*comparison.pairs(IDS, WINDOWS, batch=3)]) == 3
    shares = probe.measures()[..., MEASURES.index("mass")].mean((0, 1)).tolist()
    sliding = [kind == "sliding_attention" for kind in comparison.model.config.layer_types]
    assert any(sliding)
    for share, exact in zip(shares, sliding, strict=True):
        assert (share == pytest.approx(1.0, abs=1e-6)) == exact


def test_one_window_is_the_beginning_of_the_text() -> None:
    windows = choose(500, decode=16, length=100)
    assert (windows.starts, windows.prefill, windows.length) == ((0,), 84, 100)
    assert choose(500, decode=16, prefill=84) == windows


def test_a_stride_covers_the_text_at_several_depths() -> None:
    windows = choose(100, decode=4, prefill=16, stride=30)
    assert windows.starts == (0, 30, 60)
    assert windows.of(torch.arange(100))[:, 0].tolist() == [0, 30, 60]
    assert windows.of(torch.arange(100))[:, -1].tolist() == [19, 49, 79]
    assert choose(100, decode=4, prefill=16, stride=30, start=5).starts == (5, 35, 65)
    assert choose(100, decode=4, prefill=16, stride=30, length=50).starts == (0, 30)
    assert choose(20, decode=4, prefill=16, stride=1).starts == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": 4, "length": 200}, "only 100 tokens"),
        ({"decode": 50, "length": 50}, "--decode is 50"),
        ({"decode": 4, "length": 50, "start": 48}, "--start is 48 and --decode is 4, but --length is 50"),
        ({"decode": 4, "prefill": 97}, "ends after 101"),
        ({"decode": 4, "length": 50, "stride": 10}, "--stride needs --prefill"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose(100, **options)
