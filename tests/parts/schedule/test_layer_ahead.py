"""The CPU one layer ahead: with the real query it changes nothing, with another it does what Algorithm 1 says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from torch import Tensor
from transformers import PreTrainedModel

import coattn
from coattn.cache.ledger import Ledger
from coattn.hf.ahead import Ahead
from coattn.method.row import Method, compose
from coattn.method.table import METHODS
from coattn.step.running import RunningStep
from coattn.step.runtime import Runtime
from coattn.tools.evaluate.forced import force
from coattn.types import LayerShape, Step

SCOUT = replace(METHODS["scout"], params={**METHODS["scout"].params, "ahead_from": 1})
"""The second layer is the first one ahead."""
SAME = replace(METHODS["scout"], schedule="same_layer")
PARAMS = {"block": 4, "budget": 24, "recall_interval": 3}
LAYERS = 3


class World:
    """Three layers and two sequences; the queries of a step are known before it, so that any can be predicted."""

    def __init__(self, method: Method, **params: Any) -> None:
        self.draws = torch.Generator().manual_seed(3)
        shape = LayerShape(6, 2, 16, torch.float32, torch.device("cpu"))
        self.runtime = Runtime([shape] * LAYERS, compose(method, **PARAMS, **params), Ledger(), 2, None)
        self.lengths = (0, 0)
        self.step((61, 40), None)

    def step(self, new: tuple[int, int], predict: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
        step = Step.of((0, 1), self.lengths, new)
        made = [
            [torch.randn(step.tokens, heads, 16, generator=self.draws) for heads in (6, 2, 2)] for _ in range(LAYERS)
        ]
        running = self.runtime.begin(step)
        outs = []
        for layer, (q, k, v) in enumerate(made):
            if predict is not None and layer + 1 < LAYERS and self.runtime.predicts(running, layer + 1):
                self.runtime.predict(running, layer + 1, predict(made[layer + 1][0]), 0.4)
            outs.append(self.runtime.attend(running, layer, q, k, v, 0.4))
        self.runtime.commit(running)
        self.lengths = step.lengths
        return outs


STEPS = [*[(1, 1)] * 8, (5, 3), *[(1, 1)] * 8]


def other(q: Tensor) -> Tensor:
    """A prediction that is quite wrong, and always the same."""
    return q.roll(1, -1)


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_predicting_the_real_query_changes_nothing(dense_layers: int) -> None:
    plain, ahead = World(SAME, dense_layers=dense_layers), World(SCOUT, dense_layers=dense_layers)
    for new in STEPS:
        torch.testing.assert_close(plain.step(new, None), ahead.step(new, lambda q: q), atol=0, rtol=0)


def test_a_wrong_prediction_changes_the_cpus_part_of_all_layers_but_the_first() -> None:
    plain, ahead = World(SAME), World(SCOUT)
    want, got = plain.step((1, 1), None), ahead.step((1, 1), other)
    assert torch.equal(want[0], got[0])
    assert not torch.allclose(want[1], got[1], atol=1e-3)
    assert not torch.allclose(want[2], got[2], atol=1e-3)


def test_the_cpu_attends_with_the_predicted_query_to_what_it_picks() -> None:
    world = World(SCOUT)
    group = world.runtime.groups[0]
    started: list[Any] = []
    attended: list[Any] = []
    submit, run = group.bridge.submit, group.gpu.run
    group.bridge.submit = lambda who, call, work: started.append((call, work)) or submit(who, call, work)  # type: ignore[method-assign, func-returns-value]
    group.gpu.run = lambda call, work: attended.append((call, work)) or run(call, work)  # type: ignore[method-assign, func-returns-value]
    picked: dict[int, list[Any]] = {}
    pick = group.select.pick
    group.select.pick = lambda call: picked.setdefault(call.layer, []).append(pick(call)) or picked[call.layer][-1]  # type: ignore[method-assign, func-returns-value]
    world.step((1, 1), other)
    # predicted at layer 0, at its own turn, predicted at layer 1; the GPU with the real query in order
    assert [call.layer for call, _ in started] == [1, 0, 2]
    assert [call.layer for call, _ in attended] == [0, 1, 2]
    for call, work in attended[1:]:
        ahead_call, ahead_work = next(pair for pair in started if pair[0].layer == call.layer)
        torch.testing.assert_close(ahead_call.q, other(call.q))
        (selection,) = picked[call.layer]
        assert selection.works == (work, ahead_work)


def test_nothing_is_picked_at_a_layers_own_turn() -> None:
    world = World(SCOUT)
    group = world.runtime.groups[0]
    scored: list[int] = []
    pick = group.select.pick
    group.select.pick = lambda call: scored.append(call.layer) or pick(call)  # type: ignore[method-assign, func-returns-value]
    attended: list[Any] = []
    run = group.gpu.run
    group.gpu.run = lambda call, work: attended.append((call, work)) or run(call, work)  # type: ignore[method-assign, func-returns-value]
    residency = group.maintenance.residency  # type: ignore[attr-defined]
    world.step((1, 1), other)  # the first step after a prompt chooses residents
    scored.clear()
    attended.clear()
    held = {layer: residency.held[layer].clone() for layer in range(LAYERS)}
    world.step((1, 1), other)
    assert scored == [1, 0, 2], "each layer once, and all but the first before its turn"
    for call, work in attended:
        for seq, length in enumerate(world.lengths):
            far = -(-length // 4) - 2
            there = (held[call.layer][seq] >= 0) & (held[call.layer][seq] < far)
            assert work.blocks.tokens[seq].tolist() == (4 * there.sum(-1) + length - 4 * far).tolist()


def test_layers_before_the_first_one_ahead_are_like_same_layer() -> None:
    plain, ahead = World(SAME), World(SCOUT, ahead_from=2)
    want, got = plain.step((1, 1), None), ahead.step((1, 1), other)
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True, True, False]


def test_without_a_prediction_it_is_same_layer() -> None:
    plain, ahead = World(SAME), World(SCOUT)
    for new in STEPS[:5]:
        torch.testing.assert_close(plain.step(new, None), ahead.step(new, None), atol=0, rtol=0)


def test_what_an_aborted_step_started_is_not_used() -> None:
    plain, ahead = World(SAME), World(SCOUT)
    step = Step.of((0, 1), ahead.lengths, (1, 1))
    running = ahead.runtime.begin(step)
    ahead.runtime.predict(running, 1, torch.ones(2, 6, 16), 0.4)
    ahead.runtime.abort(running)
    torch.testing.assert_close(plain.step((1, 1), None), ahead.step((1, 1), None), atol=0, rtol=0)


def logits(model: PreTrainedModel, method: Method, params: dict[str, Any], ids: Tensor) -> Tensor:
    """A prompt of 60 tokens, then one decode step per token."""
    with coattn.attach(model, method, **params), torch.no_grad():
        out = model(ids[:, :60], use_cache=True)
        found = []
        for i in range(60, ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_real_queries_in_place_of_predicted_ones_a_model_says_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    ids = torch.randint(3, 160, (2, 72), generator=torch.Generator().manual_seed(5))
    params = {"block": 8, "budget": 32, "window_blocks": 1}
    real: list[tuple[int, Tensor]] = []
    decode = Runtime.decode

    def spy(self: Runtime, running: RunningStep, layer: int, q: Tensor, *rest: Any) -> Tensor:
        real.append((layer, q))
        return decode(self, running, layer, q, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "decode", spy)
        want = logits(model, SAME, params, ids)
    guessed = logits(model, SCOUT, params, ids)
    queries = iter(real)
    used = []

    def known(self: Ahead, layer: int, *_: Any) -> Tensor:
        q = next(q for i, q in queries if i == layer)
        used.append(layer)
        return q[:, :, None]

    monkeypatch.setattr(Ahead, "predict", known)
    got = logits(model, SCOUT, params, ids)
    assert torch.equal(want, got)
    slides = [shape.sliding_window is not None for shape in Ahead(model).shapes]
    if not all(slides[1:]):
        assert used
        assert not torch.equal(want, guessed)
    else:
        assert not used


@pytest.mark.parametrize("window_blocks", [1, 2])
def test_a_budget_of_everything_is_full_attention_whatever_is_predicted(
    window_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 160, (2, 100), generator=torch.Generator().manual_seed(5))
    predict, heard = Ahead.predict, []

    def wrong(self: Ahead, layer: int, *rest: Any) -> Tensor:
        heard.append(layer)
        return -predict(self, layer, *rest)

    monkeypatch.setattr(Ahead, "predict", wrong)
    want = logits(model, METHODS["full"], {"block": 8}, ids)
    got = logits(model, SCOUT, {"block": 8, "budget": 104, "window_blocks": window_blocks}, ids)
    torch.testing.assert_close(want, got, atol=2e-5, rtol=2e-5)
    less = logits(model, SCOUT, {"block": 8, "budget": 104, "window_blocks": window_blocks, "pool_blocks": 5}, ids)
    assert not torch.allclose(want, less, atol=1e-3)
    assert heard


def test_the_engine_looks_ahead_like_an_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    ids = torch.randint(3, 160, (2, 72), generator=torch.Generator().manual_seed(5))
    params = {"block": 8, "budget": 32, "window_blocks": 1, "ahead_from": 1}
    predicted: list[int] = []
    predict = Runtime.predict
    monkeypatch.setattr(Runtime, "predict", lambda self, *a: predicted.append(a[1]) or predict(self, *a))  # type: ignore[func-returns-value]
    attached = logits(model, SCOUT, params, ids).transpose(0, 1)
    assert predicted == [1, 2] * 12
    stepped = force(model, ids, 60, "scout", **params)
    assert predicted == [1, 2] * 24
    torch.testing.assert_close(attached, stepped.logits, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model(ids)  # neither has left a hook behind that would need a runtime
    assert not any(layer._forward_pre_hooks for layer in Ahead(model).layers)
