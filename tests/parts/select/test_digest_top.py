"""Quest's rule: the blocks whose digests promise the most, per KV head."""

from typing import Any

import pytest
import torch
from tests.dense import dense
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.select.top_tokens import best
from coattn.step.runtime import Runtime
from coattn.types import BlockList, LayerShape, Selection, Step

SCALE, BLOCK = 0.4, 4
QUEST = {"block": BLOCK, "dense_layers": 0}


class World:
    """A runtime of one layer: two sequences of 61 and 9 tokens, then steps; every key it was given is kept."""

    first = 61

    def __init__(self, method: str, gpu: int | None = None, tokens: int | None = None, **params: Any) -> None:
        self.draws, self.softcap = torch.Generator().manual_seed(1), params.pop("softcap", None)
        shape = LayerShape(6, 2, 16, torch.float32, torch.device("cpu"), softcap=self.softcap)
        self.ledger = Ledger(gpu)
        self.runtime = Runtime([shape], compose(METHODS[method], **params), self.ledger, 2, tokens)
        self.group = self.runtime.groups[0]
        self.lengths = (0, 0)
        self.seen: list[tuple[Tensor, Tensor]] = [(torch.empty(0, 2, 16),) * 2] * 2
        self.picked: list[Selection] = []
        pick = self.group.select.pick
        self.group.select.pick = lambda *a: self.picked.append(pick(*a)) or self.picked[-1]  # type: ignore[method-assign, func-returns-value]
        self.step((self.first, 9))

    def step(self, new: tuple[int, ...] = (1, 1)) -> Tensor:
        step = Step.of((0, 1), self.lengths, new)
        self.q, k, v = (torch.randn(step.tokens, heads, 16, generator=self.draws) for heads in (6, 2, 2))
        for i, (start, end) in enumerate(step.spans):
            keys, values = self.seen[i]
            self.seen[i] = torch.cat([keys, k[start:end]]), torch.cat([values, v[start:end]])
        running = self.runtime.begin(step)
        self.out = self.runtime.attend(running, 0, self.q, k, v, SCALE)
        self.runtime.commit(running)
        self.lengths = step.lengths
        return self.out

    def take_back(self, keep: int) -> None:
        """Of the first sequence."""
        self.runtime.truncate(0, self.lengths[0], keep)
        self.lengths = (keep, self.lengths[1])
        self.seen[0] = (self.seen[0][0][:keep], self.seen[0][1][:keep])

    def blocks(self, slot: int) -> list[list[int]]:
        """Numbers of the blocks that the last step attended to in a sequence, per KV head."""
        near = self.picked[-1].gpu
        owned: list[int] = self.group.cache.gpu.table.owned[slot]  # type: ignore[attr-defined]
        counts, tables = near.tokens.expand(-1, 2)[slot].tolist(), near.table.expand(-1, 2, -1)[slot].tolist()
        block = self.group.cache.block
        return [[owned.index(b) for b in ids[: -(-n // block)]] for ids, n in zip(tables, counts, strict=True)]

    def check_output(self, chosen: list[Tensor]) -> None:
        """Of the first sequence: that of these positions of each KV head."""
        keys, values = self.seen[0]
        for head, some in enumerate(chosen):
            q = self.q[0, 3 * head : 3 * head + 3]
            exact = dense(q[None], keys[some, head, None], values[some, head, None], SCALE, softcap=self.softcap)[0]
            torch.testing.assert_close(self.out[0, 3 * head : 3 * head + 3].double(), exact, atol=1e-5, rtol=1e-5)


def tokens_of(blocks: list[int], length: int) -> Tensor:
    return torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, length)) for b in blocks])


def wanted(
    q: Tensor, keys: Tensor, count: int, slack: float = 1.0, older: bool = False, sinks: int = 0
) -> list[list[int]]:
    """The rule in other words: q `[6, 16]`, keys `[n, 2, 16]` -> numbers of the blocks, per KV head.

    older: only blocks before the newest two are scored.
    """
    blocks = -(-len(keys) // BLOCK)
    full = blocks - 2 if older else len(keys) // BLOCK
    found = []
    for head in range(2):
        total = torch.zeros(full, dtype=torch.float64)
        for i in range(3):
            bounds = []
            for b in range(full):
                part = keys[b * BLOCK : (b + 1) * BLOCK, head].double()
                x = q[3 * head + i].double()
                middle = x * (part.amin(0) + part.amax(0)) / 2
                best = torch.maximum(x * part.amin(0), x * part.amax(0))
                bounds.append((slack * best + (1 - slack) * middle).sum() * SCALE)
            total += torch.stack(bounds).softmax(0)
        total[:sinks] = torch.inf
        newest = [*range(blocks - 2, blocks)]
        others = total[: blocks - 2].topk(count - 2).indices.tolist()
        found.append(sorted(others) + newest)
    return found


@pytest.mark.parametrize(("slack", "sinks"), [(1.0, 0), (0.5, 1), (0, 2)])
def test_picks_the_blocks_that_promise_most_and_the_newest(slack: float, sinks: int) -> None:
    world = World("quest", budget=24, slack=slack, sink_blocks=sinks, **QUEST)
    for new in (*[(1, 1)] * 9, (6, 3), *[(1, 1)] * 7):
        world.step(new)
        if new == (1, 1):
            assert world.blocks(0) == wanted(world.q[0], world.seen[0][0], 6, slack, older=True, sinks=sinks)
            assert len(world.blocks(1)[0]) == min(6, -(-world.lengths[1] // BLOCK))


def test_attends_to_what_it_picked_and_to_nothing_else() -> None:
    world = World("quest", budget=24, **QUEST)
    for _ in range(6):
        world.step()
        chosen = [tokens_of(blocks, world.lengths[0]) for blocks in world.blocks(0)]
        assert all(20 < len(some) <= 24 for some in chosen)
        world.check_output(chosen)


@pytest.mark.parametrize(("budget", "tokens"), [(100, None), (100, 90), (64, 90)])
def test_a_budget_of_everything_is_full_attention(budget: int, tokens: int | None) -> None:
    own, full = World("quest", None, tokens, budget=budget, **QUEST), World("full", block=BLOCK)
    for _ in range(3):
        assert torch.equal(own.step(), full.step())


def test_dense_layers_and_append_steps_see_everything() -> None:
    own, full = World("quest", budget=24, **{**QUEST, "dense_layers": 1}), World("full", block=BLOCK)
    assert torch.equal(own.step(), full.step())
    own, full = World("quest", budget=24, **QUEST), World("full", block=BLOCK)
    assert torch.equal(own.step((5, 3)), full.step((5, 3)))
    assert not torch.equal(own.step(), full.step())


def test_tokens_can_be_taken_back() -> None:
    world = World("quest", budget=24, **QUEST)
    for _ in range(5):
        world.step()
    world.take_back(50)
    for _ in range(6):
        world.step()
        assert world.blocks(0) == wanted(world.q[0], world.seen[0][0], 6, older=True)


def test_the_bytes_of_the_digests_are_counted() -> None:
    world = World("quest", None, 80, budget=24, **QUEST)
    # blocks of 4 tokens, and a digest as large as a token
    assert world.ledger.held["gpu"] == 2 * 20 * 5 * 2 * 2 * 16 * 4
    with pytest.raises(BudgetError, match="needs at least") as caught:
        World("quest", 100, 80, budget=24, **QUEST)
    least = caught.value.least
    assert least is not None
    assert least == world.ledger.held["gpu"]
    tight = World("quest", least, 80, budget=24, **QUEST)
    tight.step()
    growing = World("quest", least, None, budget=24, **QUEST)
    assert 0 < growing.ledger.held["gpu"] <= least
    growing.runtime.release()
    assert growing.ledger.held["gpu"] == 0


def test_the_best_blocks_come_oldest_first_with_the_newest_and_no_absent_one() -> None:
    scores = torch.tensor([[[5.0, 1.0, 3.0, 2.0, 0.0]]])
    listed = torch.arange(10, 15, dtype=torch.int32)[None, None]
    found = best(scores, BlockList(listed, torch.tensor([[18]]), 18), 4, 3, 1)
    assert (found.table.tolist(), found.tokens.tolist(), found.longest) == ([[[10, 12, 14]]], [[10]], 12)
    found = best(scores, BlockList(listed, torch.tensor([[7]]), 7), 4, 3, 1)
    assert (found.table[0, 0, :2].tolist(), found.tokens.tolist()) == ([10, 11], [[7]])
