"""Decode steps between the layers of a prompt: what comes out is what steps in turns give, and nobody waits long."""

from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import by_transformers, greedy, prompt, small, tokenizer
from tests.engine.test_chunk_policy import World
from tests.engine.test_mixed import LENGTHS, one_by_one

import coattn
from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.handle import Handle
from coattn.engine.request import Forward
from coattn.errors import BudgetError
from coattn.method.table import METHODS

LAYERS = 4
QUICK = ("full", "offload", "scout", "h2o")


def open_llm(method: str, between: bool, **more: Any) -> coattn.LLM:
    given = {"max_batch": 4, "max_length": 256, "chunk": 24, "reuse": False, **more}
    made = coattn.LLM((small(LAYERS), tokenizer()), method, **given)
    if between:
        # a time that no step keeps: a decode step comes after every layer
        made.engine.chunk_policy.layers, made.engine.chunk_policy.target_s = LAYERS, 1e-9
    return made


def answers(method: str, between: bool, **params: Any) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    with open_llm(method, between, **params) as engine:
        found, report = one_by_one(engine)
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


def decoding_and_reading(engine: coattn.LLM, tokens: int) -> tuple[Handle, Handle]:
    """One that has its third token, and one whose prompt comes then."""
    first = engine.submit(prompt(20, seed=4), greedy(tokens))
    while len(first.request.output) < 3:
        engine.step()
    return first, engine.submit(prompt(90, seed=4), greedy(5))


def test_a_step_that_fails_between_layers_takes_down_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("full", True) as engine:
        first, reading = decoding_and_reading(engine, 60)
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
        first, reading = decoding_and_reading(engine, 30)
        run, inside = engine.runner.decode, []

        def refuse(*given: Any) -> Any:
            inside.append(engine.engine.scheduler.timer.passed > 0)
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
        if not work.chunks:
            self.decode_for(work.requests)
            return True
        (chunk,) = work.chunks
        self.chunks += 1
        size = chunk.size
        for layer in range(self.chunk_policy.layers):
            requests = self.scheduler.passed(size) if layer else ()
            while requests:
                self.decode_for(requests)
                requests = self.scheduler.waiting_for_token() if self.chunk_policy.unsure else ()
            self.now += self.token * size / self.chunk_policy.layers
        self.scheduler.done(work)
        if chunk.last:
            self.firsts.setdefault(chunk.request.id, self.now)
            chunk.request.output.append(0)
        return True

    def decode_for(self, requests: tuple[Any, ...]) -> None:
        self.pass_a_decode_step()
        self.scheduler.done(Forward(requests=requests))
        for request in requests:
            request.output.append(0)


@pytest.mark.parametrize("fixed", [None, 4096])
def test_the_promised_time_holds_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch, fixed: int | None) -> None:
    policy = ChunkPolicy(fixed)
    policy.layers = 36
    world = Layered(monkeypatch, policy, decode=0.010, token=0.00004)
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
        assert engine.engine.chunk_policy.layers == (LAYERS if captured else 1)
        assert engine.engine.chunk_policy.fixed == (4096 if captured else 2048)
