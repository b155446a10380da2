"""Lengths and batches that nobody gives: as long as the model, where memory has room, and what is chosen opens.

Planned bytes are those that a run takes.
"""

import logging
import re

import pytest
import torch
from tests.engine.small import UNIT, greedy, prompt, small, tokenizer

import coattn
from coattn.cache import available
from coattn.cache.ledger import Dram, Ledger
from coattn.engine.plan.fit import DRAM_SHARE, DRAM_TOKENS, choose, longest
from coattn.engine.plan.kv import held
from coattn.errors import BudgetError, InputError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

GIB = 1 << 30
LAYERS = [LayerShape(32, 8, 128, torch.bfloat16, torch.device("cuda"))] * 32
TOKEN = 32 * LAYERS[0].token_bytes


def machine(gpu: int | None, dram: int) -> Ledger:
    return Ledger(gpu, None, Dram(2 * dram, dram, ("host",)))


def test_the_model_s_positions_where_one_sequence_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "coattn"):
        assert choose(LAYERS, compose(METHODS["full"]), machine(20 * GIB, GIB), None, None, 131072) == (16, 131072)
    (line,) = caplog.messages
    assert line == "Sequences have at most 131,072 tokens, as many as the model has positions; 16 run at a time."


def test_the_longest_that_fits_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    slots, tokens = choose(LAYERS, compose(METHODS["full"]), machine(6 * GIB, GIB), None, None, 131072)
    assert 0.97 * 6 * GIB < tokens * TOKEN <= 6 * GIB
    assert slots == 16, "blocks are shared"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "since memory has no room for the model's 131,072 positions" in record.message


def test_what_each_sequence_takes_for_itself_makes_fewer_run() -> None:
    window = compose(METHODS["cpu"], window_blocks=2048)
    slots, tokens = choose(LAYERS, window, machine(36 * GIB, 40 * GIB), None, None, 131072)
    assert (slots, tokens) == (4, 131072)
    assert choose(LAYERS, window, machine(36 * GIB, 40 * GIB), None, 100_000, 131072) == (4, 100_000)
    assert choose(LAYERS, window, machine(36 * GIB, 40 * GIB), 16, 131072, 131072) == (16, 131072), "as asked"
    assert longest(LAYERS, window, machine(36 * GIB, 40 * GIB), 16, 131072) == 0


def test_a_gpu_s_dram_is_not_all_taken_at_once() -> None:
    ledger = machine(8 * GIB, 200 * GIB)
    assert choose(LAYERS, compose(METHODS["cpu"]), ledger, None, None, 131072) == (16, 131072)
    assert ledger.dram.free == DRAM_SHARE * DRAM_TOKENS * TOKEN


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"duo"}))  # which needs labels of the model's heads
def test_what_is_chosen_opens_and_answers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In little memory, under every method: one sequence of the whole length that was chosen."""
    monkeypatch.setattr(available, "memory", lambda: (GIB, 400 << 10))
    with coattn.LLM((small().cpu(), tokenizer()), method) as engine:
        found = engine.generate(prompt(engine.max_length - 8), greedy(20, ignore_eos=True))[0]
        assert (len(found.token_ids), found.finish_reason, found.error) == (8, "length", None)
        assert sum(engine.ledger.peak.values()) <= 0.8 * (400 << 10)


def test_no_room_for_any_prompt_is_refused_where_the_length_is_chosen() -> None:
    with pytest.raises(BudgetError, match="No prompt can be answered: a sequence of 128 tokens") as refused:
        coattn.LLM((small(), tokenizer()), "cpu", host_kv=4 * UNIT, block=8)
    enough = re.search(r"Raise host_kv to (\w+) or more", refused.value.hint)
    assert enough is not None
    with coattn.LLM((small(), tokenizer()), "cpu", host_kv=enough[1], block=8) as engine:
        assert len(engine.generate(prompt(100), greedy(8, ignore_eos=True))[0].token_ids) == 8


@pytest.mark.parametrize("method", ["full", "cpu", "offload", "auto", "hgca", "scout", "hcattention", "streaming"])
def test_the_budget_of_a_hint_is_enough_at_the_first_try(method: str) -> None:
    def answer(gpu_kv: int | str) -> int:
        with coattn.LLM((small(), tokenizer()), method, gpu_kv=gpu_kv, max_length=256, max_batch=1) as engine:
            found = engine.generate(prompt(240), greedy(16, ignore_eos=True))[0]
            assert found.error is None
            return len(found.token_ids)

    with pytest.raises(BudgetError) as refused:
        answer(1024)
    enough = re.search(r"Raise gpu_kv to ([\d.]+\w+)", refused.value.hint)
    assert enough is not None, refused.value.hint
    assert answer(enough[1]) == 16


def test_a_prompt_that_is_too_long_names_the_argument() -> None:
    with coattn.LLM((small(), tokenizer()), max_length=64) as engine, pytest.raises(InputError) as refused:
        engine.generate(prompt(70))
    assert "raise max_length (now 64)" in refused.value.hint


@pytest.mark.parametrize("method", sorted(METHODS))
def test_planned_bytes_are_taken_bytes(method: str) -> None:
    composed, ledger = compose(METHODS[method]), Ledger()
    shapes = [LayerShape(4, 2, 64, torch.float32, torch.device("cpu"))] * 3
    runtime = Runtime(shapes, composed, ledger, 2, 1000)
    running = runtime.begin(Step.of((0, 1), (0, 0), (1000, 1000)))
    assert held(shapes, composed, 2, 1000) == ledger.held
    runtime.abort(running)
    runtime.release()
