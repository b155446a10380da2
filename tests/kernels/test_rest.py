"""What stands in for entries that are not attended, beside what it stands for."""

import math

import pytest
import torch
from torch import Tensor

from coattn.kernels.quantise.sketch import AXES, Sketcher, fit, spread_of
from coattn.kernels.rest import Rest, flush_rest, lean, rest_value, sum_rest, width

HEADS, GROUP, D, N = 2, 3, 16, 4_000


def world() -> tuple[Tensor, Tensor, Sketcher]:
    """Keys of channels of different spread, far from zero, and values that are linear in them but for noise."""
    torch.manual_seed(0)
    keys = torch.randn(N, HEADS, D) * torch.logspace(0.3, -1, D) + 3 * torch.randn(HEADS, D)
    values = torch.einsum("nhd,hde->nhe", keys, torch.randn(HEADS, D, D)) + torch.randn(N, HEADS, D)
    return keys, values, fit(spread_of(keys[::8], None), 64)


def found(q: Tensor, rest: Rest, bound: Tensor, softcap: float | None = None) -> Tensor:
    out, rows = torch.empty(q.shape), len(q)
    rest_value(q, rest, bound, torch.full((rows,), 0.5), torch.zeros(rows, dtype=torch.int32), 0.25, softcap, out)
    return out.view(rows, HEADS, GROUP, D)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("share", [1.0, 0.99, 0.9])
def test_it_is_nearly_the_mean_value_of_what_is_left_out(share: float, softcap: float | None) -> None:
    keys, values, sketcher = world()
    q = torch.randn(4, HEADS * GROUP, D)
    scores = torch.einsum("rhgd,nhd->rhgn", q.view(4, HEADS, GROUP, D), keys) * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bound = scores.quantile(share, -1) + (1.0 if share == 1 else 0.0)
    left = scores.masked_fill(scores > bound[..., None], -torch.inf).softmax(-1)
    want, mean = torch.einsum("rhgn,nhd->rhgd", left, values), values.mean(0)[:, None]
    rest = Rest(sum_rest(keys, values, sketcher)[None], sketcher)
    got = found(q, rest, bound.flatten(1) - 0.5, softcap)
    off, plain = ((x - want).norm(dim=-1).mean() for x in (got, mean.expand_as(want)))
    assert off < (0.15 if softcap is None else 0.3) * plain


def test_without_tables_and_without_entries_it_is_the_mean_value() -> None:
    keys, values, made = world()
    nothing = Sketcher.zeros(HEADS, 64, D, torch.float32, keys.device)
    q, bound = torch.randn(1, HEADS * GROUP, D), torch.zeros(1, HEADS * GROUP)
    got = found(q, Rest(sum_rest(keys, values, nothing)[None], nothing), bound)
    torch.testing.assert_close(got, values.mean(0)[None, :, None].expand_as(got), atol=1e-4, rtol=1e-4)
    assert not found(q, Rest(torch.zeros(1, HEADS, width(D)), made), bound).any()


@pytest.mark.parametrize("bound", [-math.inf, -1e30, 1e30, math.inf])
def test_bounds_far_away_are_numbers(bound: float) -> None:
    keys, values, made = world()
    q = torch.randn(1, HEADS * GROUP, D)
    rest = Rest(sum_rest(keys, values, made)[None], made)
    for softcap in (None, 20.0):
        assert found(q, rest, torch.full((1, HEADS * GROUP), bound), softcap).isfinite().all()


def test_a_bound_takes_the_lean_back() -> None:
    """Scores of unit deviation, weighed by their powers: their mean, by a sum over a fine grid."""
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    weights = (x - x.square() / 2).exp()
    for most in (-2.0, 0.0, 1.0, 3.0, 8.0):
        below = x <= most
        want = (x * weights)[below].sum() / weights[below].sum()
        assert float(lean(torch.tensor(most - 1.0).double(), torch.tensor(1.0))) == pytest.approx(float(want), abs=1e-3)


def test_blocks_that_fill_add_to_their_sequences() -> None:
    keys, values, made = world()
    gpu = torch.stack([keys[:64], values[:64]], 2).view(4, 16, HEADS, 2, D).permute(0, 2, 3, 1, 4).contiguous()
    sums = torch.randn(3, HEADS, width(D))
    want = sums.clone()
    want[2] += sum_rest(keys[16:32], values[16:32], made)
    block, to, seq = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [-1, 7], [1, 2]))
    flush_rest(gpu, sums, block, to, seq, made)
    torch.testing.assert_close(sums, want, atol=1e-4, rtol=1e-5)


def test_axes_are_the_channels_of_most_spread() -> None:
    keys, _, made = world()
    lowest = made.axes[:, :8]
    assert (made.axes.shape[1], int(made.axes[:, D:].max())) == (AXES, -1)
    assert (made.bit.gather(1, lowest.long()) == 0).all()
    turned = torch.einsum("nhd,hpd->nhp", keys, made.of) - made.start[None]
    spread = (turned.std(0) * made.worth.norm(dim=-1)).gather(1, lowest.long())
    assert (spread.diff(dim=1) < 0.05 * spread[:, :1]).all()
