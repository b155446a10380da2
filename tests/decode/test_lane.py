"""Decode steps at the same time as a prompt: the same tokens, on a part of the GPU; none where it cannot be divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.engine.small import greedy, prompt, small, tokenizer

import coattn
from coattn.decode import lane, partition
from coattn.decode.capture import GraphRunner
from coattn.decode.lane import Lane, lane_for


def test_no_lane_without_captured_steps() -> None:
    with coattn.LLM((small(2), tokenizer()), "full", max_batch=2, max_length=64) as engine:
        if engine.not_captured is not None:
            assert lane_for(engine.runner) == "decode steps are not captured"
            assert engine.engine.between.lane is None
            assert not engine.engine.pace.lane


@pytest.mark.parametrize(("own", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_no_lane_for_products_of_a_library(own: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "own_products", lambda: own)
    runner = GraphRunner.__new__(GraphRunner)
    exact = SimpleNamespace(exact=True)
    runner.runtime = cast("Any", SimpleNamespace(tiered=lambda: False, composed=exact))
    runner.session = cast("Any", SimpleNamespace(model=SimpleNamespace(dtype=dtype)))
    runner.devices, runner.sizes = (torch.device("cpu"),), (8, 16, 24)
    assert "a library's" in str(lane_for(runner))


def test_a_driver_that_does_not_divide_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> Any:
        raise OSError("there is no libcuda")

    monkeypatch.setattr(partition.ctypes, "CDLL", refuse)
    assert "there is no libcuda" in str(partition.split(torch.device("cuda", 7), 16))


@pytest.mark.gpu
def test_the_same_tokens_as_in_turns() -> None:
    answers = []
    for beside in (True, False):
        with coattn.LLM((small(4), tokenizer()), "full", max_batch=3, max_length=512, chunk=64, reuse=False) as engine:
            if not isinstance(engine.engine.between.lane, Lane):
                pytest.skip("this GPU is not divided")
            engine.engine.pace.lane = beside
            handles = [engine.submit(prompt(n, seed=4), greedy(100)) for n in (40, 60)]
            while not all(handle.request.output for handle in handles):
                engine.step()
            handles.append(engine.submit(prompt(440, seed=5), greedy(20)))
            answers.append([handle.result().token_ids for handle in handles])
            assert engine.report()["failed_steps"] == 0
            assert engine.report()["between_steps"] > 0
    assert answers[0] == answers[1]
