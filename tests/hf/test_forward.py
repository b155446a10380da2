"""Packed calls equal Transformers for every family, and the model is left as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, FEATURED, tiny
from tests.hf.test_attach import IDS, SHORT, assert_same, fail, footprint
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel

import coattn
from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.errors import UnsupportedError
from coattn.hf.families import positions
from coattn.hf.forward import Session, end_tokens
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime

LENGTHS = (37, 1, 60)
EXACT: list[tuple[str, dict[str, Any]]] = [("full", {"block": 8}), ("offload", {"block": 8}), ("cpu", {"block": 8})]


def open_runner(session: Session, method: str, params: dict[str, Any]) -> Runner:
    composed = compose(find_method(method), **params)
    return Runner(session, Runtime(session.layers, composed, Ledger(), 3, 128, fixed=True), 3)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 160, (n + 12,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def plain(model: PreTrainedModel) -> list[torch.Tensor]:
    """Per sequence the logits after its prompt and after each of the next tokens, by Transformers, in float64."""
    return [model(ids[None]).logits[0, n - 1 :].double() for ids, n in zip(texts(), LENGTHS, strict=True)]


def packed(runner: Runner, chunk: int) -> list[torch.Tensor]:
    """The same through packed calls: prompts in chunks, then all sequences together, in changing order."""
    found: list[list[torch.Tensor]] = []
    for slot, (ids, n) in enumerate(zip(texts(), LENGTHS, strict=True)):
        logits = None
        for start in range(0, n, chunk):
            end = min(start + chunk, n)
            logits = runner.extend(slot, ids[start:end].tolist(), start, want_logits=end == n)
            assert (logits is not None) == (end == n)
        found.append([logits[0].clone()])
    for i in range(12):
        slots = [0, 1, 2] if i % 2 else [2, 0, 1]
        history = [LENGTHS[slot] + i for slot in slots]
        logits = runner.decode(slots, [int(texts()[slot][h]) for slot, h in zip(slots, history, strict=True)], history)
        for slot, row in zip(slots, logits, strict=True):
            found[slot].append(row.clone())
    return [torch.stack(rows).double() for rows in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_calls_equal_transformers(family: str, device: torch.device) -> None:
    exact, same = plain(tiny(family, dtype=torch.float64)), plain(tiny(family))
    allowed = 2 * max((a - b).abs().max().item() for a, b in zip(exact, same, strict=True))
    with Session(tiny(family, device)) as session:
        every = family in FEATURED or device.type == "cuda"
        for method, params in EXACT if every else EXACT[:1] + EXACT[-1:]:
            runner = open_runner(session, method, params)
            for chunk in (64, 16) if every else (16,):
                error = max((a - b.cpu()).abs().max().item() for a, b in zip(exact, packed(runner, chunk), strict=True))
                assert 0 < error <= allowed, f"{method}, chunk {chunk}: error {error:.3g}, allowed {allowed:.3g}"
                for slot in range(3):
                    runner.runtime.truncate(slot, LENGTHS[slot] + 12, 0)
            runner.runtime.release()


@contextmanager
def through_attach(model: PreTrainedModel, method: str) -> Iterator[Callable[[], object]]:
    with coattn.attach(model, method):
        yield lambda: model.generate(IDS, **SHORT)


@contextmanager
def through_packed_calls(model: PreTrainedModel, method: str) -> Iterator[Callable[[], object]]:
    with Session(model) as session:
        runner = open_runner(session, method, {})
        yield lambda: runner.extend(0, [3, 4, 5], 0, want_logits=True)


DOORS = pytest.mark.parametrize("door", [through_attach, through_packed_calls])


@DOORS
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "gpt_neox"])
@torch.no_grad()
def test_the_model_is_as_before(family: str, door: Any) -> None:
    model = tiny(family)
    before = footprint(model)
    with door(model, "cpu") as call:
        call()
    assert_same(before, footprint(model))


@DOORS
@torch.no_grad()
def test_the_model_is_as_before_after_an_exception(door: Any) -> None:
    model = tiny("llama")
    before = footprint(model)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half way"), door(model, "offload") as call:
        call()
    hook.remove()
    assert_same(before, footprint(model))


def test_one_user_at_a_time() -> None:
    model = tiny("llama")
    with Session(model):
        with pytest.raises(UnsupportedError, match="already"), coattn.attach(model):
            pass
        with pytest.raises(UnsupportedError, match="in use already"):
            Session(model)
        for call in (lambda: model.generate(IDS, **SHORT), lambda: model(IDS)):
            with pytest.raises(UnsupportedError, match="belongs to an open engine"):
                call()
    with coattn.attach(model), pytest.raises(UnsupportedError, match="in use already"):
        Session(model)
    model.generate(IDS, **SHORT)


def test_sessions_of_several_models_and_an_attachment_live_side_by_side() -> None:
    first, second, third = tiny("llama"), tiny("qwen3"), tiny("llama")
    alone = {}
    for name, model in (("llama", first), ("qwen3", second)):
        with Session(model) as session:
            alone[name] = open_runner(session, "full", {}).extend(0, [3, 4, 5], 0, want_logits=True)
    plain_third = third.generate(IDS, **SHORT)
    with Session(first) as a, coattn.attach(third), Session(second) as b:
        runners = {"llama": open_runner(a, "full", {}), "qwen3": open_runner(b, "cpu", {})}
        assert torch.equal(third.generate(IDS, **SHORT), plain_third)
        for name, runner in runners.items():
            assert torch.equal(runner.extend(0, [3, 4, 5], 0, want_logits=True), alone[name])


def test_changing_the_attention_under_a_session_is_noticed() -> None:
    model = tiny("llama")
    with Session(model) as session:
        runner = open_runner(session, "full", {})
        model.config._attn_implementation_internal = "eager"
        with pytest.raises(UnsupportedError, match="was set to 'eager'"):
            runner.extend(0, [3, 4], 0, want_logits=False)


def test_scaling_that_depends_on_the_neighbours_ends_where_it_changes() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    config = Phi3Config(**FAMILIES["phi3"][1], original_max_position_embeddings=128, rope_scaling=rope)
    model = AutoModelForCausalLM.from_config(config)
    assert model.config.max_position_embeddings == 512
    assert positions(model.config) == 128
    assert positions(tiny("llama").config) == 512


def test_end_tokens_come_from_the_generation_config_first() -> None:
    model = tiny("llama")
    assert end_tokens(model, None) == {2}
    model.generation_config.eos_token_id = [5, 6]
    assert end_tokens(model, None) == {5, 6}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_tokens(model, type("T", (), {"eos_token_id": 9})) == {9}
    assert end_tokens(model, None) == frozenset()
