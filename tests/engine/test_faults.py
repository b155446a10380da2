"""Workers that stall, fail or die in the middle of a step: an error in time, and then everything as before."""

import time
from collections.abc import Iterator

import pytest
from tests.engine.small import DEVICE, greedy, llm, prompt

from coattn.errors import WorkerError
from coattn.native.core import extension

LONG = 100
"""Tokens of a prompt that does not fit in the window: the CPU takes part in its decode steps."""


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    yield
    extension.inject_fault("")


@pytest.mark.parametrize("fault", ["stall", "die", "throw"])
def test_lost_workers_cost_a_step_and_nobody_a_token(fault: str) -> None:
    params = greedy(20, ignore_eos=True)
    with llm("cpu", max_batch=2, window_blocks=1) as engine:
        runner = engine.engine.runner
        want = engine.generate(prompt(LONG), params)[0].token_ids
        held, free = dict(engine.ledger.held), dict(runner.runtime.free_bytes())
        handles = [engine.submit(prompt(LONG), params) for _ in range(3)]
        while len(handles[1].output().token_ids) < 5:
            engine.step()
        extension.inject_fault(fault, 6.0)
        start = time.perf_counter()
        engine.step()
        assert time.perf_counter() - start < 4.0, "long before the stall is over, however busy the machine is"
        assert engine.report()["failed_steps"] == 1
        for handle in handles:
            assert handle.result().token_ids == want, "new workers have tried the step again"
        assert dict(runner.runtime.free_bytes()) == free
        assert engine.ledger.held == held
        assert engine.generate([prompt(LONG)] * 3, params)[2].token_ids == want


def test_who_is_alone_in_a_step_that_fails_fails_with_it() -> None:
    params = greedy(20, ignore_eos=True)
    with llm("cpu", max_batch=1, window_blocks=1) as engine:
        want = engine.generate(prompt(LONG), params)[0].token_ids
        one, two = (engine.submit(prompt(LONG), params) for _ in range(2))
        while len(one.output().token_ids) < 5:
            engine.step()
        extension.inject_fault("throw")
        result = one.result()
        assert result.finish_reason == "error"
        assert isinstance(result.error, WorkerError)
        assert result.error.hint
        assert result.token_ids == want[: len(result.token_ids)]
        assert two.result().token_ids == want


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU reads prompts by itself: no worker takes part")
def test_a_fault_in_a_step_that_reads_and_decodes_costs_nobody_anything() -> None:
    """The step is taken apart: those who decode go on, the prompt is read again by itself."""
    params = greedy(30, ignore_eos=True)
    with llm("cpu", reuse=False) as engine:
        long = engine.generate(prompt(150), greedy(5))[0].token_ids
        want = engine.generate(prompt(40), params)[0].token_ids
        running = engine.submit(prompt(40), params)
        for _ in range(4):
            engine.step()
        reading = engine.submit(prompt(150), greedy(5))
        engine.step()
        while not (reading.request.stored and engine.engine.scheduler.timer.spent == 0):
            engine.step()
        extension.inject_fault("throw")
        engine.step()
        assert engine.report()["failed_steps"] == 1
        assert reading.result().token_ids == long
        assert running.result().token_ids == want
