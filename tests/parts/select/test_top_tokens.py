"""Rules that pick single tokens: the ceiling (oracle) and the floor (random) of a budget."""

import pytest
import torch
from tests.parts.select.test_digest_top import SCALE
from tests.parts.select.test_digest_top import World as Blocks
from torch import Tensor


class World(Blocks):
    """Blocks of one token."""

    first = 40

    def chosen(self) -> list[list[list[int]]]:
        """Positions that the next step attends to, per sequence and KV head."""
        self.step()
        return [self.blocks(slot) for slot in (0, 1)]

    def weights(self, slot: int) -> Tensor:
        """True weights of the last queries of a sequence, summed over each group: `[kv_heads, n]` float64."""
        keys = self.seen[slot][0].double()
        scores = torch.einsum("hgd,nhd->hgn", self.q[slot].double().view(2, 3, 16), keys) * SCALE
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.softmax(-1).sum(1)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_the_oracle_takes_the_largest_true_weights_and_the_newest_token(softcap: float | None) -> None:
    world = World("oracle", softcap=softcap, budget=12)
    for _ in range(4):
        found = world.chosen()
        weights = world.weights(0)
        weights[:, -1] = 9.0
        for head in range(2):
            assert found[0][head] == sorted(weights[head].topk(12).indices.tolist())
        n = len(world.seen[1][0])
        assert found[1] == ([[*range(n)]] * 2 if n <= 12 else found[1])
        assert all(len(head) == min(n, 12) for head in found[1])


def test_the_oracle_attends_to_what_it_picked() -> None:
    world = World("oracle", budget=12)
    found = world.chosen()
    world.check_output([torch.tensor(some) for some in found[0]])


@pytest.mark.parametrize("method", ["oracle", "random"])
def test_a_budget_of_everything_is_full_attention_to_the_bit(method: str) -> None:
    own, full = World(method, budget=60), World("full", block=1)
    for _ in range(5):
        assert torch.equal(own.step(), full.step())


def test_random_takes_exactly_the_budget_with_the_newest_token() -> None:
    world = World("random", budget=12)
    first, second = world.chosen(), world.chosen()
    for found, n in ((first, 41), (second, 42)):
        for head in found[0]:
            assert len(set(head)) == 12
            assert head[-1] == n - 1
    assert first[0][0] != first[0][1]
    assert first[0][0][:-1] != second[0][0][:-1]
    assert World("random", budget=12).chosen() == first
    assert World("random", budget=12, seed=1).chosen() != first


def test_random_prefers_no_position() -> None:
    world, counts = World("random", budget=11), torch.zeros(40)
    for _ in range(300):
        for head in world.chosen()[0]:
            counts[[p for p in head if p < 40]] += 1
    assert counts.min() > 0.5 * counts.mean()
    assert counts.max() < 1.5 * counts.mean()


@pytest.mark.parametrize("method", ["oracle", "random"])
def test_a_step_with_many_tokens_sees_everything(method: str) -> None:
    own, full = World(method, budget=4), World("full", block=1)
    assert torch.equal(own.step((5, 3)), full.step((5, 3)))
    assert not torch.equal(own.step(), full.step())
