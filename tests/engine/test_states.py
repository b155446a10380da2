"""An engine over models some of whose layers have a state instead of a KV cache."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import DEVICE, greedy, tokenizer
from tests.hf.test_table import small
from transformers import PreTrainedModel

import coattn
from coattn.cache.states import KEPT, ROWS, state_bytes
from coattn.errors import BudgetError, ConfigError, UnsupportedError
from coattn.hf.architectures import describe_states
from coattn.hf.prefilled import prefill

FAMILY, NEW = "qwen3_5_text", 16
KINDS = (FAMILY, "nemotron_h", "lfm2")
PROMPTS = [[5 + (i * i + 3 * j) % 90 for i in range(20 + 9 * j)] for j in range(3)]


@cache
def model_of(family: str, alone: bool = False) -> PreTrainedModel:
    """alone: one that no engine has."""
    return small(family, 0).to(DEVICE)


@cache
def want(family: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """By Transformers alone."""
    ids = torch.tensor([prompt], device=DEVICE)
    made: Any = model_of(family, alone=True).generate(ids, max_new_tokens=NEW, do_sample=False)
    return tuple(made[0, len(prompt) :].tolist())


def llm(family: str = FAMILY, method: str = "full", **options: Any) -> coattn.LLM:
    given = {"max_batch": 3, "max_length": 128, "chunk": 16, "block": 8, **options}
    return coattn.LLM((model_of(family), tokenizer()), method, **given)


def parked_states(engine: coattn.LLM) -> int:
    """Kept of sequences, not of prefixes."""
    states, prefixes = engine.runner.runtime.states, engine.store.sharing.states
    assert states is not None
    assert prefixes is not None
    return states.kept - len(prefixes._kept)


def asked() -> coattn.SamplingParams:
    return greedy(NEW, ignore_eos=True)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("method", ["full", "cpu", "offload"])
def test_chunks_and_batches_give_the_same_tokens(family: str, method: str) -> None:
    """Prompts of several chunks, read beside each other and beside sequences that decode."""
    with llm(family, method) as engine:
        for _ in range(2):  # the second time, slots have states of others
            made = engine.generate(PROMPTS, asked())
            assert [each.token_ids for each in made] == [want(family, tuple(each)) for each in PROMPTS]
        assert engine.report()["not_shared"] is None
        assert engine.report()["cached_tokens"] == sum((len(each) - 2) // 16 * 16 for each in PROMPTS)


def test_states_are_counted_and_given_back() -> None:
    states = describe_states(model_of(FAMILY))
    assert state_bytes(states) == 2 * 4 * (96 * 4 + 2 * 16 * 16)
    with llm() as engine:
        rows = ROWS * 3 + (DEVICE.type == "cuda")
        assert engine.runner.runtime.states is not None
        assert engine.runner.runtime.states.bytes == rows * state_bytes(states)
        assert engine.ledger.held["gpu"] > rows * state_bytes(states)
        ledger = engine.ledger
    assert ledger.held == {"gpu": 0, "host": 0}
    with pytest.raises(BudgetError, match="The states of 3 sequences"):
        llm(gpu_kv=rows * state_bytes(states) - 1)


@pytest.mark.parametrize("method", ["full", "cpu"])
def test_a_request_that_lost_its_slot_goes_on(method: str) -> None:
    with llm(method=method) as engine:
        handles = [engine.submit(each, asked()) for each in PROMPTS]
        while len(handles[2].output().token_ids) < 5:
            engine.engine.step()
        read = engine.report()["prefill_tokens"]
        assert engine.engine.scheduler.preempt()
        for handle, prompt in zip(handles, PROMPTS, strict=True):
            assert handle.result().token_ids == want(FAMILY, tuple(prompt))
        assert engine.report()["preemptions"] == 1
        assert engine.report()["prefill_tokens"] == read, "its state was kept"


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("method", ["full", "cpu"])
def test_a_session_goes_on_here_and_from_its_file(method: str, moved: bool, tmp_path: Path) -> None:
    first, second = PROMPTS[0], [7, 8, 9, 10]
    text = (*first, *want(FAMILY, tuple(first)), *second)
    for again in (False, True):
        with llm(method=method, session_dir=tmp_path) as engine:
            with engine.session("one") as session:
                if not again:
                    assert session.ask(first, asked()).token_ids == want(FAMILY, tuple(first))
                    session.save()
                    if moved:  # others need its blocks
                        for table in engine.store.tables:
                            engine.store.parked.evict(1, table)
                before = engine.report()["prefill_tokens"]
                assert session.ask(second, asked()).token_ids == want(FAMILY, text)
                if not moved or method == "full":
                    assert engine.report()["prefill_tokens"] - before == len(second) + 1, "the rest was stored"
                assert parked_states(engine) == 1
            assert parked_states(engine) == 0


@pytest.mark.parametrize("kept", [0, 1, KEPT])
@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_begins_where_a_state_was_kept(family: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cache.states.KEPT", kept - 1)
    first = [*PROMPTS[2], *PROMPTS[1]]
    others = [[*first[:at], 11, 12, 13, 14] for at in (16, 35, 60)]
    with llm(family, max_batch=1) as engine:
        for prompt in (first, *others, first):
            assert engine.generate(prompt, asked())[0].token_ids == want(family, tuple(prompt))
        found = engine.report()["cached_tokens"]
        assert engine.store.sharing.states is not None
        assert engine.runner.runtime.states is not None
        assert len(engine.store.sharing.states._kept) == engine.runner.runtime.states.kept <= kept
        # chunks of 16 end at multiples of 8, and the last one begins at one
        assert found == {0: 0, 1: 16 + 32, KEPT: 16 + 32 + 48 + 64}[kept]


def test_a_session_that_says_something_else_goes_on_from_its_beginning() -> None:
    first = PROMPTS[1]
    with llm() as engine, engine.session() as session:
        session.ask(first, asked())
        other = [*first[:-3], 11, 12, 13]
        assert session.submit_whole(other, asked()).result().token_ids == want(FAMILY, tuple(other))
        assert engine.report()["cached_tokens"] == 16


@pytest.mark.parametrize("method", ["full", "cpu"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_a_step_that_fails_costs_nobody_a_token(method: str, layer: int) -> None:
    """Once, in a decode step of three and in a chunk; then again."""
    model, left = model_of(FAMILY), [0]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ValueError("here")

    hook = model.get_decoder().get_submodule(f"layers.{layer}.mlp").register_forward_pre_hook(fail)
    try:
        with llm(method=method) as engine:
            for when in (2, 9):
                left[0] = when
                handles = [engine.submit(each, asked()) for each in PROMPTS]
                results = [handle.result() for handle in handles]
                assert engine.report()["failed_steps"] > 0
                for result, prompt in zip(results, PROMPTS, strict=True):
                    if result.error is None:
                        assert result.token_ids == want(FAMILY, tuple(prompt))
                assert sum(result.error is not None for result in results) <= 1, "whose step it was alone"
    finally:
        hook.remove()


def test_what_states_do_not_allow_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="have layers with a state between those that attend"):
        llm(method="scout")
    with pytest.raises(UnsupportedError, match="not read by another process"):
        prefill(model_of(FAMILY), PROMPTS[0])
    with pytest.raises(ConfigError, match="are not divided between devices"):
        llm(devices=["cpu:0", "cpu:1"])
