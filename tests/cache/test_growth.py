"""Memories that grow: what lies in memory meanwhile, and what is left where there is not enough."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.parts.executor.staging import Staging
from coattn.types import LayerShape, Tier

LAYERS = {i: LayerShape(4, 2, 8, torch.float32, torch.device("cpu")) for i in range(4)}
TIERS: list[Tier] = ["gpu", "host"]


def live_bytes() -> int:
    """Of all tensors of this process, each storage once."""
    found = {}
    for each in gc.get_objects():
        if type(each) is Tensor and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@contextmanager
def watched(fails_at: int = -1) -> Iterator[list[int]]:
    """Bytes beside those of the beginning after each allocation. fails_at: the one that there is no memory for."""
    zeros, seen, before = torch.zeros, [], live_bytes()

    def noted(*args: Any, **more: Any) -> Tensor:
        if len(seen) == fails_at:
            raise RuntimeError("can't allocate memory")
        made = zeros(*args, **more)
        seen.append(live_bytes() - before)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", noted)
        yield seen


def memory(tier: Tier, ledger: Ledger | None = None) -> BlockMemory:
    """Eight blocks, each with its number in it."""
    made = BlockMemory(tier, LAYERS, 4, ledger or Ledger(), "It")
    made.reserve(8)
    for layer in LAYERS:
        made[layer][:] = torch.arange(8.0).view(8, 1, 1, 1, 1)
    return made


@pytest.mark.parametrize("tier", TIERS, ids="{}_tier".format)
def test_a_memory_grows_one_layer_at_a_time(tier: Tier) -> None:
    before = live_bytes()
    blocks = memory(tier)
    assert live_bytes() - before == blocks.bytes == 8 * blocks.block_bytes
    with watched() as seen:
        blocks.reserve(9)
    assert blocks.capacity == 12
    one = blocks.block_bytes // len(LAYERS)
    assert max(seen) + 8 * blocks.block_bytes <= blocks.bytes + 8 * one, "beside what is counted, one layer as it was"
    assert live_bytes() - before == blocks.bytes
    assert blocks.ledger.held[tier] == blocks.ledger.peak[tier] == blocks.bytes
    for layer in LAYERS:
        assert blocks[layer][:8, 0, 0, 0, 0].tolist() == list(range(8))
        assert not blocks[layer][8:].any()


@pytest.mark.parametrize("tier", TIERS, ids="{}_tier".format)
@pytest.mark.parametrize("at", [0, 2])
def test_growth_that_fails_leaves_a_memory_as_it_was(tier: Tier, at: int) -> None:
    blocks = memory(tier)
    before = live_bytes()
    with watched(fails_at=at), pytest.raises((BudgetError, RuntimeError)):
        blocks.reserve(9)
    assert blocks.capacity == 8
    assert blocks.ledger.held[tier] == 8 * blocks.block_bytes
    assert live_bytes() == before
    for layer in LAYERS:
        assert blocks[layer][:, 0, 0, 0, 0].tolist() == list(range(8))
    blocks.reserve(9)
    assert blocks[3][:8, 0, 0, 0, 0].tolist() == list(range(8))


def test_staging_drops_what_it_has_before_it_grows() -> None:
    ledger = Ledger()
    staging = Staging(LAYERS, ledger, 4)
    before = live_bytes()
    with watched() as seen:
        staging.reserve(8)
        staging.reserve(12)
    assert seen == [8 * staging.unit, 12 * staging.unit]
    assert live_bytes() - before == ledger.held["gpu"] == 12 * staging.unit
    with watched(fails_at=0), pytest.raises(RuntimeError):
        staging.reserve(20)
    assert ledger.held["gpu"] == live_bytes() - before == 0
    staging.reserve(3)
    assert staging.fill(0, memory("host"), [1, 2]).wait().shape[0] == 3
