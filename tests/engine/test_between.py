"""Decode steps between the layers of a prompt: what comes out is what steps in turns give, and nobody waits long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import by_transformers, greedy, prompt, small, tokenizer
from tests.engine.test_mixed import LENGTHS
from tests.engine.test_pace import World

import coattn
from coattn.engine.pace import Pace
from coattn.engine.work import Decode, Extend
from coattn.errors import BudgetError
from coattn.methods import METHODS

LAYERS = 4
QUICK = ("full", "offload", "scout", "h2o")


def open_llm(method: str, between: bool, **more: Any) -> coattn.LLM:
    given = {"max_batch": 4, "max_length": 256, "chunk": 24, "reuse": False, **more}
    made = coattn.LLM((small(LAYERS), tokenizer()), method, **given)
    if between:
        # a time that no step keeps: a decode step comes after every layer
        made.engine.pace.layers, made.engine.pace.target_s = LAYERS, 1e-9
    return made


def answers(method: str, between: bool, **params: Any) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Requests that come while others decode, one every third step."""
    with open_llm(method, between, **params) as engine:
        engine.generate(prompt(90, seed=9), greedy(1))  # makes the codebook, where there is one
        handles = []
        for n in LENGTHS:
            handles.append(engine.submit(prompt(n, seed=4), greedy(25)))
            for _ in range(3):
                engine.step()
        found = [handle.result().token_ids for handle in handles]
        report = engine.report()
        assert report["failed_steps"] == 0
        assert report["decode_steps"] >= report["between_steps"]
        return found, report


@pytest.mark.parametrize(
    "method",
    # what `random` draws depends on how often it was asked before
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "random"],
)
def test_the_same_as_in_turns(method: str) -> None:
    params = options(method)
    inside, report = answers(method, True, **params)
    assert report["between_steps"] > 5
    assert report["mixed_steps"] == 0
    apart, other = answers(method, False, **params)
    assert other["between_steps"] == 0
    assert inside == apart
    if report["exact"]:
        assert inside == [by_transformers(small(LAYERS), prompt(n, seed=4), 25) for n in LENGTHS]


def test_a_step_that_fails_between_layers_takes_down_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("full", True) as engine:
        first = engine.submit(prompt(20, seed=4), greedy(60))
        while len(first.request.output) < 3:
            engine.step()
        reading = engine.submit(prompt(90, seed=4), greedy(5))
        run, runner = engine.runner.decode, engine.runner
        monkeypatch.setattr(runner, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        while not first.done:
            engine.step()
        monkeypatch.setattr(runner, "decode", run)
        assert first.request.error is not None
        assert reading.result().token_ids == by_transformers(small(LAYERS), prompt(90, seed=4), 5)
        assert engine.report()["running"] == 0


def test_no_room_between_layers_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds no room in the middle of a prompt gets a token later."""
    with open_llm("full", True) as engine:
        first = engine.submit(prompt(20, seed=4), greedy(30))
        while len(first.request.output) < 3:
            engine.step()
        reading = engine.submit(prompt(90, seed=4), greedy(5))
        run, inside = engine.runner.decode, []

        def refuse(*given: Any) -> Any:
            inside.append(engine.runner.runtime.between is None and engine.engine.scheduler.gap.passed > 0)
            if inside[-1]:
                raise BudgetError("Full.", "Wait.")
            return run(*given)

        monkeypatch.setattr(engine.runner, "decode", refuse)
        assert reading.result().token_ids == by_transformers(small(LAYERS), prompt(90, seed=4), 5)
        assert first.result().token_ids == by_transformers(small(LAYERS), prompt(20, seed=4), 30)
        assert any(inside)
        assert engine.report()["failed_steps"] == 0


class Layered(World):
    """The same machine, where a chunk is left between its layers."""

    chunks = 0

    def step(self) -> bool:
        work = self.scheduler.next()
        assert isinstance(work, Extend | Decode)
        if isinstance(work, Decode):
            self.decode_for(work.requests)
            return True
        self.chunks += 1
        size = work.end - work.request.stored
        for layer in range(self.pace.layers):
            requests = self.scheduler.passed(size) if layer else ()
            while requests:
                self.decode_for(requests)
                requests = self.scheduler.waiting_for_token() if self.pace.unsure else ()
            self.now += self.token * size / self.pace.layers
        self.scheduler.done(work)
        if work.last:
            self.firsts.setdefault(work.request.id, self.now)
            work.request.output.append(0)
        return True

    def decode_for(self, requests: tuple[Any, ...]) -> None:
        self.now += self.decode
        if self._last is not None:
            self.gaps.append(self.now - self._last)
        self._last = self.now
        self.scheduler.done(Decode(requests))
        for request in requests:
            request.output.append(0)


@pytest.mark.parametrize("fixed", [None, 4096])
def test_the_promised_time_holds_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch, fixed: int | None) -> None:
    pace = Pace(fixed)
    pace.layers = 36
    world = Layered(monkeypatch, pace, decode=0.010, token=0.00004)
    for i in range(8):
        world.add(i, 16)
    for _ in range(40):
        world.step()
    world.gaps.clear()
    world.add(99, 64000)
    begin, world.chunks = world.now, 0
    while 99 not in world.firsts:
        world.step()
    assert world.chunks <= 64000 // 2048 + 2, "each takes several times as long as is promised"
    assert max(world.gaps[2:]) <= 0.028 * 1.001
    assert world.firsts[99] - begin <= 0.00004 * 64000 * 28 / 18 * 1.25


def test_a_gpu_decodes_between_layers() -> None:
    with coattn.LLM((small(LAYERS), tokenizer()), "streaming", block=8, max_length=256) as engine:
        captured = torch.cuda.is_available() and engine.not_captured is None
        assert engine.engine.pace.layers == (LAYERS if captured else 1)
        assert engine.engine.pace.fixed == (4096 if captured else 2048)


class PretendedLane:
    """Decode steps that take the time of three layers. Runs them where there is no GPU to divide."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.begun: Any = None
        self.asked = self.steps = self.chunks = 0

    @property
    def pending(self) -> bool:
        return self.begun is not None

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.chunks += 1
        yield

    def here(self) -> Any:
        return nullcontext()

    def start(self, *step: Any) -> None:
        assert not self.pending
        self.begun, self.asked = step, 0

    def done(self) -> bool:
        self.asked += self.pending
        return self.asked > 3

    def finish(self) -> Any:
        step, self.begun, self.asked = self.begun, None, 0
        self.steps += 1
        return self.runner.decode(*step)

    def mark(self) -> None:
        pass

    def near(self) -> bool:
        return True

    idle = near

    def pause(self) -> None:
        raise AssertionError("the GPU is near")


def on_a_lane(**more: Any) -> tuple[coattn.LLM, PretendedLane]:
    made = open_llm("full", False, **more)
    lane: Any = PretendedLane(made.runner)
    made.engine.between.lane, made.engine.pace.lane, made.engine.pace.layers = lane, True, LAYERS
    return made, lane


def test_steps_beside_a_chunk_give_what_transformers_gives() -> None:
    made, lane = on_a_lane()
    with made:
        first = made.submit(prompt(40, seed=4), greedy(60))
        while len(first.request.output) < 3:
            made.step()
        second = made.submit(prompt(90, seed=5), greedy(20))
        found = [handle.result().token_ids for handle in (first, second)]
        assert lane.chunks == 4  # while nobody else was read or waited
        assert lane.steps == made.report()["between_steps"] > 2
        assert made.report()["failed_steps"] == 0
    for (length, seed, new), own in zip([(40, 4, 60), (90, 5, 20)], found, strict=True):
        assert own == by_transformers(small(LAYERS), prompt(length, seed=seed), new)


def test_a_step_is_looked_for_in_every_layer_and_at_the_borders_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, lane = on_a_lane()
    with made:
        first = made.submit(prompt(40, seed=4), greedy(60))
        while len(first.request.output) < 3:
            made.step()
        second = made.submit(prompt(90, seed=5), greedy(2))
        seen: list[bool] = []
        hand_on, runtime = made.engine.between.hand_on, made.runner.runtime

        def noted(on: Any) -> None:
            seen.append(runtime.step is None)
            hand_on(on)

        monkeypatch.setattr(made.engine.between, "hand_on", noted)
        assert second.result().error is None
        # when a chunk is begun, before and after each layer's attention; and before it begins, when it is over, and
        # once more at the prompt's end
        assert seen.count(False) == lane.chunks * (1 + 2 * LAYERS)
        assert seen.count(True) == lane.chunks * 2 + 1


def test_prompts_that_wait_have_the_gpu_to_themselves() -> None:
    made, lane = on_a_lane()
    with made:
        first = made.submit(prompt(40, seed=4), greedy(60))
        while len(first.request.output) < 3:
            made.step()
        others = [made.submit(prompt(90, seed=seed), greedy(2)) for seed in (5, 6)]
        made.step()
        assert made.engine.pace.crowded
        assert lane.chunks == 0
        for handle in (first, *others):
            assert handle.result().error is None
        made.engine.pace.target_s = 1.0  # a promise is kept in turns
        assert not made.engine.pace.beside


def test_several_decode_beside_prompts_that_wait() -> None:
    made, lane = on_a_lane(max_batch=6)
    lengths = [(20, 4, 40), (25, 5, 40), (30, 6, 40), (90, 7, 4), (80, 8, 4)]
    with made:
        handles = [made.submit(prompt(n, seed=seed), greedy(new)) for n, seed, new in lengths[:3]]
        while not all(handle.request.output for handle in handles):
            made.step()
        before = lane.chunks
        handles += [made.submit(prompt(n, seed=seed), greedy(new)) for n, seed, new in lengths[3:]]
        made.step()
        assert made.engine.pace.crowded
        assert lane.chunks == before + 1
        found = [handle.result().token_ids for handle in handles]
        assert 2 < lane.steps <= made.report()["between_steps"]
        assert made.report()["failed_steps"] == 0
    for (length, seed, new), own in zip(lengths, found, strict=True):
        assert own == by_transformers(small(LAYERS), prompt(length, seed=seed), new)


def test_a_step_that_fails_beside_a_chunk_fails_alone() -> None:
    made, lane = on_a_lane()
    with made:
        first = made.submit(prompt(40, seed=4), greedy(60))
        while len(first.request.output) < 3:
            made.step()
        second = made.submit(prompt(90, seed=5), greedy(20))

        def fail() -> Any:
            lane.begun = None
            raise RuntimeError("no step")

        lane.finish = fail  # type: ignore[method-assign]
        assert second.result().error is None
        assert "no step" in str(first.result().error)
        assert second.result().token_ids == by_transformers(small(LAYERS), prompt(90, seed=5), 20)
        assert made.report()["failed_steps"] == 1


def test_a_request_that_is_cancelled_while_its_step_runs_beside_a_chunk() -> None:
    made, _lane = on_a_lane()
    with made:
        first = made.submit(prompt(40, seed=4), greedy(60))
        while len(first.request.output) < 3:
            made.step()
        second = made.submit(prompt(90, seed=5), greedy(20))
        while not made.engine.between.pending:
            made.step()
        first.cancel()
        assert not made.engine.between.pending
        assert second.result().token_ids == by_transformers(small(LAYERS), prompt(90, seed=5), 20)
        assert first.result().finish_reason == "cancelled"
        assert made.report()["failed_steps"] == 0
