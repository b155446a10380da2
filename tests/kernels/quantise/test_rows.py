"""Rows in 8 bits: keys with much in common lose little."""

import pytest
import torch

from coattn.kernels.quantise.rows import TILE, ZERO, PackedRows

HEADS, D = 3, 64
CPU = torch.device("cpu")


def keys(count: int) -> torch.Tensor:
    """As models have them: far from zero, channels of very different spread."""
    torch.manual_seed(0)
    return torch.randn(HEADS, count, D) * torch.logspace(1, -2, D) + 20 * torch.randn(HEADS, 1, D)


def test_what_all_keys_share_costs_no_steps() -> None:
    k, v = keys(40), torch.randn(HEADS, 40, D)
    rows = PackedRows.make(3, HEADS, 40, D, CPU)
    rows.learn(1, k)
    rows.put(1, slice(None), torch.arange(40), k, v)
    q = torch.randn(HEADS, D) / torch.logspace(1, -2, D)
    for head in range(HEADS):
        got, values = rows.rows(1, head, torch.arange(40))
        steps = rows.scales[1, head, 0, :40].float()[:, None] * rows.spread[1, head]
        assert ((got - k[head]).abs() <= 0.51 * steps + 1e-5).all()
        assert ((values - v[head]).abs() <= 0.51 * rows.scales[1, head, 1, :40].float()[:, None]).all()
        # a scale a token alone rounds the small channels away
        alone = k[head].abs().amax(-1, keepdim=True) / 127
        plain = (k[head] / alone).round() * alone
        assert (q[head] @ (got - k[head]).T).norm() < 0.1 * (q[head] @ (plain - k[head]).T).norm()


def test_spreads_are_powers_of_two_also_of_channels_that_never_change() -> None:
    k = keys(30)
    k[:, :, 7] = 3.0
    rows = PackedRows.make(2, HEADS, 32, D, CPU)
    rows.learn(0, k)
    assert rows.spread.log2().equal(rows.spread.log2().round())
    rows.put(0, slice(None), torch.arange(30), k, k)
    assert rows.rows(0, 0, torch.arange(30))[0][:, 7].eq(3.0).all()


def test_places_are_written_one_by_one() -> None:
    rows = PackedRows.make(2, HEADS, 20, D, CPU)
    assert rows.places == 2 * TILE
    v = torch.zeros(1, D)
    v[0, 5] = 2.0
    rows.put(0, 1, torch.tensor([6]), torch.zeros(1, D), v)
    found = rows.codes[0, 1, 1]
    assert int(found[6, 5]) == ZERO + 127
    assert int((found != ZERO).sum()) == 1
    assert (rows.codes[0, 0] == ZERO).all()
    assert rows.rows(0, 1, torch.tensor([3, 6]))[1][1, 5] == pytest.approx(2.0, rel=1e-3)


def test_bytes_are_those_of_the_tensors() -> None:
    rows = PackedRows.make(3, HEADS, 40, D, CPU)
    tensors = [x for x in vars(rows).values() if isinstance(x, torch.Tensor)]
    assert PackedRows.bytes(3, HEADS, 40, D) == sum(x.numel() * x.element_size() for x in tensors)
    assert PackedRows.token_bytes(HEADS, D) == HEADS * (2 * D + 6)
