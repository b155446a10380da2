"""Rules that pick single tokens: the ceiling (oracle) and the floor (random) of a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dense import dense
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Selection, Step

LENGTHS, SCALE = (40, 9), 0.4


class World:
    """A runtime of one layer: two sequences of 40 and 9 tokens, then decode steps; every key it was given is kept."""

    def __init__(self, method: str, softcap: float | None = None, **params: Any) -> None:
        self.draws = torch.Generator().manual_seed(1)
        shape = LayerShape(6, 2, 16, torch.float32, torch.device("cpu"), softcap=softcap)
        self.runtime = Runtime([shape], compose(METHODS[method], **params), Ledger(), 2, None)
        self.softcap, self.lengths = softcap, (0, 0)
        self.seen: list[tuple[Tensor, Tensor]] = [(torch.empty(0, 2, 16),) * 2] * 2
        self.step(LENGTHS)

    def step(self, new: tuple[int, ...] = (1, 1)) -> tuple[Tensor, Tensor]:
        """Returns the queries and the output."""
        step = Step.of((0, 1), self.lengths, new)
        q, k, v = (torch.randn(step.tokens, heads, 16, generator=self.draws) for heads in (6, 2, 2))
        for i, (start, end) in enumerate(step.spans):
            keys, values = self.seen[i]
            self.seen[i] = torch.cat([keys, k[start:end]]), torch.cat([values, v[start:end]])
        running = self.runtime.begin(step)
        out = self.runtime.attend(running, 0, q, k, v, SCALE)
        self.runtime.commit(running)
        self.lengths = step.lengths
        return q, out

    def picked(self) -> list[list[list[int]]]:
        """Positions that the next step attends to, per sequence and KV head, with the step's queries in `self.q`."""
        group, found = self.runtime.groups[0], []
        original = group.select.pick
        caught: list[Selection] = []
        group.select.pick = lambda *a: caught.append(original(*a)) or caught[0]  # type: ignore[method-assign, func-returns-value]
        self.q, self.out = self.step()
        group.select.pick = original  # type: ignore[method-assign]
        near = caught[0].gpu
        assert near is not None
        for slot in range(2):
            owned = group.cache.gpu.table.owned[slot]  # type: ignore[attr-defined]
            counts, tables = near.tokens.expand(-1, 2)[slot].tolist(), near.table.expand(-1, 2, -1)[slot].tolist()
            found.append([[owned.index(b) for b in ids[:n]] for ids, n in zip(tables, counts, strict=True)])
        return found

    def weights(self, slot: int) -> Tensor:
        """True weights of the last queries of a sequence, summed over each group: `[kv_heads, n]` float64."""
        keys = self.seen[slot][0].double()
        scores = torch.einsum("hgd,nhd->hgn", self.q[slot].double().view(2, 3, 16), keys) * SCALE
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.softmax(-1).sum(1)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_the_oracle_takes_the_largest_true_weights_and_the_newest_token(softcap: float | None) -> None:
    world = World("oracle", softcap, budget=12)
    for _ in range(4):
        found = world.picked()
        weights = world.weights(0)
        weights[:, -1] = 9.0
        for head in range(2):
            assert found[0][head] == sorted(weights[head].topk(12).indices.tolist())
        n = len(world.seen[1][0])
        assert found[1] == ([[*range(n)]] * 2 if n <= 12 else found[1])
        assert all(len(head) == min(n, 12) for head in found[1])


def test_the_oracle_attends_to_what_it_picked() -> None:
    world = World("oracle", budget=12)
    found = world.picked()
    keys, values = world.seen[0]
    for head in range(2):
        some = torch.tensor(found[0][head])
        q = world.q[0, 3 * head : 3 * head + 3]
        exact = dense(q[None], keys[some, head : head + 1], values[some, head : head + 1], SCALE)[0]
        torch.testing.assert_close(world.out[0, 3 * head : 3 * head + 3].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["oracle", "random"])
def test_a_budget_of_everything_is_full_attention_to_the_bit(method: str) -> None:
    own, full = World(method, budget=60), World("full", block=1)
    for _ in range(5):
        assert torch.equal(own.step()[1], full.step()[1])


def test_random_takes_exactly_the_budget_with_the_newest_token() -> None:
    world = World("random", budget=12)
    first, second = world.picked(), world.picked()
    for found, n in ((first, 41), (second, 42)):
        for head in found[0]:
            assert len(set(head)) == 12
            assert head[-1] == n - 1
    assert first[0][0] != first[0][1]
    assert first[0][0][:-1] != second[0][0][:-1]
    assert World("random", budget=12).picked() == first
    assert World("random", budget=12, seed=1).picked() != first


def test_random_prefers_no_position() -> None:
    world, counts = World("random", budget=11), torch.zeros(40)
    for _ in range(300):
        for head in world.picked()[0]:
            counts[[p for p in head if p < 40]] += 1
    assert counts.min() > 0.5 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()


@pytest.mark.parametrize("method", ["oracle", "random"])
def test_a_step_with_many_tokens_sees_everything(method: str) -> None:
    own, full = World(method, budget=4), World("full", block=1)
    assert torch.equal(own.step((5, 3))[1], full.step((5, 3))[1])
    assert not torch.equal(own.step()[1], full.step()[1])
