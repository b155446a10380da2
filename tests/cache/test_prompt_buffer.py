"""Prompts that are read in chunks where the cache keeps codes: attended as they are, the same however they are cut."""

from collections.abc import Callable
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


def attend(
    runtime: Runtime,
    slot: int,
    start: int,
    end: int,
    more: bool = False,
    seed: int | None = None,
    begun: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Tokens of a slot's text in a step of their own -> what each layer's attention gave.

    more: of the prompt come; begun: called before the first layer.
    """
    running = runtime.begin(replace(Step.of((slot,), (start,), (end - start,)), more=frozenset({slot} if more else ())))
    begun()
    found = [
        runtime.attend(running, layer, *(x[start:end] for x in each), 0.3)
        for layer, each in enumerate(numbers(slot if seed is None else seed))
    ]
    runtime.commit(running)
    return found


def read(runtime: Runtime, chunk: int, slot: int = 0) -> list[Tensor]:
    """The whole prompt in chunks -> what each layer's attention gave."""
    ends = [(at, min(TOKENS, at + chunk)) for at in range(0, TOKENS, chunk)]
    found = [attend(runtime, slot, at, end, more=end < TOKENS) for at, end in ends]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def assert_dense(outs: list[Tensor], start: int = 0, seed: int = 0, near: float = 1e-5) -> None:
    """Each layer's output is that of textbook attention over a text's tokens up to it."""
    for out, (q, k, v) in zip(outs, numbers(seed), strict=True):
        end = start + len(out)
        want = dense(q[start:end], k[:end], v[:end], 0.3, dtype=torch.float64)
        torch.testing.assert_close(out, want.float(), atol=near, rtol=1e-4)


def decode(runtime: Runtime, slot: int = 0) -> list[Tensor]:
    return attend(runtime, slot, TOKENS, TOKENS + 1)


def state(runtime: Runtime, slot: int = 0) -> list[Tensor]:
    """Codes, values in DRAM, sums of values and centroids of every layer."""
    group = runtime.groups[0]
    index, host = cast("Codes", group.index), group.cache.host
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
    assert_dense(read(whole, TOKENS))
    held = whole_ledger.held
    values = LAYERS * SHAPE.token_bytes // 2 * BLOCK * (TOKENS // BLOCK + 1)
    room = {
        "gpu": None if gpu is None else held["gpu"] + gpu * PROMPT // 2,
        "host": None if host is None else values + PROMPT + 64 * LAYERS * SHAPE.token_bytes,
    }
    ledger = Ledger(room["gpu"], room["host"])
    cut = open_runtime(ledger)
    before = dict(ledger.held)
    assert_dense(read(cut, chunk))
    torch.testing.assert_close(state(cut), state(whole), atol=0, rtol=0)
    torch.testing.assert_close(decode(cut), decode(whole))
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
            running = cut.begin(replace(Step.of((0,), (at,), (end - at,)), more=more))
            for layer, (q, k, v) in enumerate(numbers(0)):
                if layer or attempt:
                    cut.attend(running, layer, q[at:end], k[at:end], v[at:end], 0.3)
            cut.commit(running) if attempt else cut.abort(running)
    torch.testing.assert_close(state(cut), state(whole))


def test_a_prompt_that_is_given_up_leaves_no_page() -> None:
    ledger = Ledger()
    runtime = open_runtime(ledger)
    before = dict(ledger.held)
    attend(runtime, 0, 0, 90, more=True)
    assert ledger.held["gpu"] > before["gpu"]
    runtime.truncate(0, 90, 0)
    assert ledger.held == before


def test_no_room_anywhere_is_refused() -> None:
    held = open_runtime(Ledger()).ledger.held
    ledger = Ledger(held["gpu"], None)
    runtime = open_runtime(ledger)
    ledger.host = ledger.held["host"]
    with pytest.raises(BudgetError, match="while it is read"):
        attend(runtime, 0, 0, 90, more=True)
