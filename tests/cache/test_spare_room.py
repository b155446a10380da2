"""Prompts that are read in chunks where every key lies in DRAM: kept in spare GPU memory meanwhile, or not."""

from typing import Any

import pytest
import torch
from tests.cache.test_prompt_buffer import BLOCK, LAYERS, SHAPE, TOKENS, assert_dense, attend, decode, read

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime

PARAMS: dict[str, dict[str, Any]] = {
    "offload": {},
    "cpu": {},
    "scout": {"budget": 6 * BLOCK, "sink_blocks": 1},
    "hgca": {"beta": 0.5},
}
PAGE = LAYERS * 64 * SHAPE.token_bytes


def open_runtime(method: str, ledger: Ledger, **params: Any) -> Runtime:
    given = {"block": BLOCK, "window_blocks": 2, **PARAMS[method], **params}
    return Runtime([SHAPE] * LAYERS, compose(METHODS[method], **given), ledger, 2, TOKENS + 8, fixed=True)


def needed(method: str) -> int:
    """Bytes of the GPU tier without any page."""
    ledger = Ledger()
    open_runtime(method, ledger)
    return ledger.held["gpu"]


@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("pages", [None, 0, 1, 16])
def test_any_room_gives_the_same(method: str, pages: int | None) -> None:
    """No budget and so no pages here, none that fits, one page of four, and all of them."""
    base = needed(method)
    ledger = Ledger(None if pages is None else base + pages * PAGE)
    runtime, plain = open_runtime(method, ledger), open_runtime(method, Ledger())
    before = ledger.held["gpu"]
    assert_dense(read(runtime, 64))
    stay = 4 * PAGE if pages == 16 else 0
    assert ledger.held["gpu"] == before + stay, "pages of a prompt that is over stay in half of the room"
    assert (ledger.peak["gpu"] - before >= PAGE) == bool(pages)
    read(plain, 64)
    torch.testing.assert_close(decode(runtime), decode(plain))
    runtime.release()
    assert ledger.held == {"gpu": 0, "host": 0}


@pytest.mark.parametrize(("method", "form"), [*((method, "model") for method in PARAMS), ("cpu", "int8")])
def test_a_prompt_that_follows_stored_tokens_fetches_them_once(method: str, form: str) -> None:
    """Not at all, where one chunk is all that comes: that reads them where they lie."""
    ledger, near = Ledger(needed(method) + 16 * PAGE), 1e-5 if form == "model" else 0.03
    runtime = open_runtime(method, ledger, host_dtype=form)
    cache: Any = runtime.groups[0].cache
    held: list[bool] = []
    for at, end in ((0, 40), (40, 50), (50, 114), (114, 178), (178, TOKENS)):
        outs = attend(runtime, 0, at, end, end in (114, 178), begun=lambda: held.append(bool(cache.prompts.held)))
        assert_dense(outs, at, near=near)
    assert held == [False, False, True, True, True]


def test_a_prompt_that_decodes_early_or_is_given_up_leaves_no_page() -> None:
    ledger = Ledger(needed("scout") + 16 * PAGE)
    runtime = open_runtime("scout", ledger)
    before = ledger.held["gpu"]
    for slot in (0, 1):
        attend(runtime, slot, 0, 64, more=True)
    assert ledger.held["gpu"] >= before + 2 * PAGE
    attend(runtime, 0, 64, 65)
    runtime.truncate(1, 64, 0)
    assert ledger.held["gpu"] == before
