"""Prompts that are read in chunks where the cache keeps codes: attended as they are, the same however they are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.dense import dense
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.index.codes.index import Codes
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

LAYERS, KV, GROUP, D, BLOCK = 2, 2, 3, 16, 8
TOKENS = 203
SHAPE = LayerShape(KV * GROUP, KV, D, torch.float32, torch.device("cpu"))
PROMPT = LAYERS * TOKENS * SHAPE.token_bytes


def numbers(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(TOKENS + 8, heads, D, generator=draws) for heads in (KV * GROUP, KV, KV))  # type: ignore[misc]
        for _ in range(LAYERS)
    ]


def open_runtime(ledger: Ledger, **params: Any) -> Runtime:
    given = {"block": BLOCK, "window_blocks": 2, "centroids": 32, "groups": 8, **params}
    return Runtime([SHAPE] * LAYERS, compose(METHODS["hcattention"], **given), ledger, 2, TOKENS + 8, fixed=True)


def read(runtime: Runtime, chunk: int, slot: int = 0) -> list[Tensor]:
    """The whole prompt in chunks -> what each layer's attention gave."""
    found: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for at in range(0, TOKENS, chunk):
        end = min(TOKENS, at + chunk)
        step = Step.of((slot,), (at,), (end - at,))
        if end < TOKENS:
            step = replace(step, more=frozenset({slot}))
        running = runtime.begin(step)
        for layer, (q, k, v) in enumerate(numbers(slot)):
            found[layer].append(runtime.attend(running, layer, q[at:end], k[at:end], v[at:end], 0.3))
        runtime.commit(running)
    return [torch.cat(parts) for parts in found]


def decode(runtime: Runtime, slot: int = 0) -> list[Tensor]:
    running = runtime.begin(Step.of((slot,), (TOKENS,), (1,)))
    found = [
        runtime.attend(running, layer, *(x[TOKENS : TOKENS + 1] for x in each), 0.3)
        for layer, each in enumerate(numbers(slot))
    ]
    runtime.commit(running)
    return found


def state(runtime: Runtime, slot: int = 0) -> list[Tensor]:
    """Codes, values in DRAM, sums of values and centroids of every layer."""
    group = runtime.groups[0]
    index, host = cast("Codes", group.index), group.cache.host
    assert host is not None
    ids = torch.tensor(host.table.owned[slot][: TOKENS // BLOCK])
    found = []
    for layer in range(LAYERS):
        found += [index.memory[layer][ids], host.memory[layer][ids], index.means.sums[layer][slot]]
        found.append(index.books.made[layer].centroids)
    return found


@pytest.mark.parametrize(
    ("gpu", "host"), [(None, None), (0, None), (0, 1), (1, None)], ids=["", "DRAM", "tight", "both"]
)
@pytest.mark.parametrize("chunk", [64, 7])
def test_chunks_are_read_exactly_and_coded_as_a_whole(chunk: int, gpu: int | None, host: int | None) -> None:
    """On the GPU, in DRAM, in DRAM to the byte, and one page here, the others there."""
    whole_ledger = Ledger()
    whole = open_runtime(whole_ledger)
    for layer, out in enumerate(read(whole, TOKENS)):
        q, k, v = (x[:TOKENS] for x in numbers(0)[layer])
        torch.testing.assert_close(out, dense(q, k, v, 0.3, dtype=torch.float64).float(), atol=1e-5, rtol=1e-4)
    held = whole_ledger.held
    values = LAYERS * SHAPE.token_bytes // 2 * BLOCK * (TOKENS // BLOCK + 1)
    room = {
        "gpu": None if gpu is None else held["gpu"] + gpu * PROMPT // 2,
        "host": None if host is None else values + PROMPT + 64 * LAYERS * SHAPE.token_bytes,
    }
    ledger = Ledger(room["gpu"], room["host"])
    cut = open_runtime(ledger)
    before = dict(ledger.held)
    for layer, out in enumerate(read(cut, chunk)):
        q, k, v = (x[:TOKENS] for x in numbers(0)[layer])
        torch.testing.assert_close(out, dense(q, k, v, 0.3, dtype=torch.float64).float(), atol=1e-5, rtol=1e-4)
    for own, want in zip(state(cut), state(whole), strict=True):
        assert torch.equal(own, want)
    for own, want in zip(decode(cut), decode(whole), strict=True):
        torch.testing.assert_close(own, want)
    assert ledger.held["gpu"] == before["gpu"], "pages in GPU memory are given back with the prompt's end"
    if gpu == 0:
        assert ledger.peak["host"] > before["host"]
    cut.release()
    assert ledger.held == {"gpu": 0, "host": 0}


def test_a_step_that_fails_changes_nothing() -> None:
    whole, cut = open_runtime(Ledger()), open_runtime(Ledger())
    read(whole, TOKENS)
    for at, end in ((0, 88), (88, TOKENS)):
        for attempt in range(2):
            more = frozenset({0}) if end < TOKENS else frozenset()
            running = cut.begin(Step(Step.of((0,), (at,), (end - at,)).phase, (0,), (at,), (end - at,), more))
            for layer, (q, k, v) in enumerate(numbers(0)):
                if layer or attempt:
                    cut.attend(running, layer, q[at:end], k[at:end], v[at:end], 0.3)
            cut.commit(running) if attempt else cut.abort(running)
    for own, want in zip(state(cut), state(whole), strict=True):
        torch.testing.assert_close(own, want)


def test_a_prompt_that_is_given_up_leaves_no_page() -> None:
    ledger = Ledger()
    runtime = open_runtime(ledger)
    before = dict(ledger.held)
    running = runtime.begin(Step(Step.of((0,), (0,), (90,)).phase, (0,), (0,), (90,), frozenset({0})))
    for layer, (q, k, v) in enumerate(numbers(0)):
        runtime.attend(running, layer, q[:90], k[:90], v[:90], 0.3)
    runtime.commit(running)
    assert ledger.held["gpu"] > before["gpu"]
    runtime.truncate(0, 90, 0)
    assert ledger.held == before


def test_no_room_anywhere_is_refused() -> None:
    held = open_runtime(Ledger()).ledger.held
    ledger = Ledger(held["gpu"], None)
    runtime = open_runtime(ledger)
    ledger.host = ledger.held["host"]
    with pytest.raises(BudgetError, match="while it is read"):
        runtime.begin(Step(Step.of((0,), (0,), (90,)).phase, (0,), (0,), (90,), frozenset({0})))
