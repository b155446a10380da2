"""Cells: where blocks lie and what was attended, beside what the parts themselves report."""

from typing import Any

import pytest
import torch
from tests.engine.small import greedy, llm, prompt

from coattn.engine.request import Request
from coattn.step.trace.blocks import CELLS, Seen, cells
from coattn.units import ceil_div

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU captures steps, which leave only lists on the host"
)
ROWS = {
    "full": {},
    "cpu": {"window_blocks": 2},
    "quest": {"budget": 48, "dense_layers": 0},
    "scout": {"window_blocks": 2, "budget": 48, "ahead_from": 1},
    "hgca": {"window_blocks": 2},
    "hcattention": {"window_blocks": 2},
    "streaming": {"sinks": 8, "recent": 24},
}


@pytest.mark.parametrize("method", ROWS)
def test_cells_agree_with_what_was_attended(method: str) -> None:
    options: dict[str, Any] = ROWS[method]
    with llm(method, **options) as engine:
        runtime = engine.runner.runtime
        seen, request = Seen(runtime), decoding(engine)
        assert request.slot is not None
        seen.look([(request.slot, request.stored)])
        group = runtime.groups[-1]
        found = cells(group, seen, request.slot, request.stored)
        assert found["block"] == 8
        assert len(found["where"]) == len(found["attended"]) == ceil_div(request.stored, 8)
        where, tokens = found["where"], request.stored
        first = group.cache.gpu.first(tokens)
        if method in ("full", "quest"):
            assert set(where) == {"g"}
        elif method == "streaming":
            assert where == "g" + "x" * ((tokens - 24) // 8 - 1) + "g" * (len(where) - (tokens - 24) // 8)
        else:
            assert where == "h" * (first - group.cache.gpu.sinks) + where[first - group.cache.gpu.sinks :]
            assert where.count("h") == first - group.cache.gpu.sinks
        bright = [letter for letter, digit in zip(where, found["attended"], strict=True) if digit != "0"]
        assert "x" not in bright
        assert found["attended"][-1] == "9", "a token sees itself"
        if engine.composed.exact:
            assert (set(found["attended"]), found["attended_from"]) == ({"9"}, "all")
        else:
            assert found["attended_from"] == (f"layer {seen.layer}" if method == "scout" else "window")
        if method == "scout":
            share = seen.shares[request.slot]
            assert share.max() <= 1
            assert 8 * float(share.sum()) <= 2 * 48 + 8, "no more than the rule may attend to"
            assert "0" in found["attended"], "some are left out"
            assert any(digit != "0" for letter, digit in zip(where, found["attended"], strict=True) if letter == "h")


def decoding(engine: Any) -> Request:
    """A request in the middle of its answer."""
    handle = engine.submit(prompt(150), greedy(20, ignore_eos=True))
    while len(handle.request.output) < 4:
        engine.step()
    return handle.request


def test_a_long_sequence_has_no_more_cells_than_can_be_shown() -> None:
    with llm("full") as engine:
        found = cells(engine.runner.runtime.groups[-1], None, 0, 8 * 5000)
        assert (found["per"], len(found["where"])) == (5, 1000)
        assert len(found["where"]) <= CELLS
        assert len(found["attended"]) == len(found["where"])


@pytest.mark.parametrize("method", ["full", "cpu"])
def test_cells_of_a_common_beginning_are_shared_while_another_runs(method: str) -> None:
    options: dict[str, Any] = ROWS[method]
    with llm(method, **options) as engine:
        text, group = prompt(64), engine.runner.runtime.groups[-1]
        handles = [engine.submit([*text, *prompt(9, seed)], greedy(30, ignore_eos=True)) for seed in (1, 2)]
        while len(handles[1].request.output) < 4:
            assert engine.step()
        before = [cells(group, None, each.request.slot, each.request.stored) for each in handles]
        letter = "g" if method == "full" else "h"
        for found in before:
            where = found["where"]
            assert where == "s" * 8 + where[8:]
            assert "s" not in where[8:]
            assert (letter in where[8:]) == (method == "full"), "the window is each one's own"
            assert found["attended"] == "9" * len(where)
        handles[0].cancel()
        engine.step()
        alone = cells(group, None, handles[1].request.slot, handles[1].request.stored)
        assert "s" not in alone["where"]
        assert alone["where"][:8] == letter * 8
        handles[1].cancel()
