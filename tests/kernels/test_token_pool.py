"""What a pool of single tokens knows of the last step."""

import math

import torch

from coattn.kernels.pool_memory import NEVER, PoolTensors

BLOCK, HEADS, D = 4, 2, 8


def made() -> PoolTensors:
    """Two slots and one for padding; of slot 1 tokens 8 to 1 lie in places 0 to 7."""
    pool = PoolTensors.make(torch.zeros(6, HEADS, 2, BLOCK, D), 0, 3, 32, 2 * BLOCK, 4)
    tokens = torch.arange(8, 0, -1).expand(HEADS, -1)
    pool.fill(1, tokens, torch.randn(HEADS, 8, D), torch.randn(HEADS, 8, D))
    return pool


def test_only_wanted_tokens_of_the_pool_get_young() -> None:
    pool = made()
    before = pool.age.clone()
    pool.clock[1] = 5
    wanted = torch.zeros(3, HEADS, 10, dtype=torch.bool)
    wanted[0, 0, [1, 9]] = True  # the second lies nowhere
    wanted[0, 1, 4:7] = True
    wanted[1:] = True  # rows of padding, of which nothing lies in a pool
    pool.touch(torch.tensor([1, 2, 2], dtype=torch.int32), wanted)
    before[1, 0, 7] = 5
    before[1, 1, 2:5] = 5
    assert pool.age.equal(before)
    assert (pool.age[[0, 2]] == NEVER).all()


def test_an_estimate_that_was_off_by_nothing_known_is_taken_as_it_is() -> None:
    pool = made()
    seq = torch.tensor([1, 0], dtype=torch.int32)
    assert pool.off(seq).equal(torch.zeros(2, 4))
    pool.est_lse[1] = torch.tensor([1.0, 2.0, torch.inf, -torch.inf])
    pool.true_lse[1, 3:5] = 0.5
    found = pool.off(seq)
    torch.testing.assert_close(found[0, :2], 0.5 + math.log(2) - torch.tensor([1.0, 2.0]))
    assert found[0, 2:].equal(torch.zeros(2))
    assert found[1].equal(torch.zeros(4))
    pool.fill(1, torch.arange(8).expand(HEADS, -1), torch.randn(HEADS, 8, D), torch.randn(HEADS, 8, D))
    assert pool.off(seq).equal(torch.zeros(2, 4))
