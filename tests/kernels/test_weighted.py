"""`top_p` and `weighted_sum`: plain meaning, and the C++ kernel against it."""

import pytest
import torch

from coattn.kernels.native import weighted_sum as native
from coattn.kernels.quantise.values import ValueBlocks, pack_values, unpack_values
from coattn.kernels.top_p import top_p
from coattn.kernels.weighted_sum import reference, weighted_sum

NOTHING = torch.tensor(-torch.inf)


def test_top_p_keeps_the_fewest_entries_that_reach_the_mass() -> None:
    weights = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    for tau, wanted in ((0.3, [1]), (0.39, [1]), (0.6, [1, 3]), (0.84, [1, 3, 4]), (0.94, [0, 1, 3, 4]), (1, range(5))):
        assert top_p(weights.log(), NOTHING, tau, None).nonzero()[:, 0].tolist() == list(wanted), tau


def test_what_is_near_counts() -> None:
    weights, near = torch.tensor([0.3, 0.15, 0.05]), torch.tensor(0.5)
    for tau, wanted in ((0.4, []), (0.6, [0]), (0.9, [0, 1]), (0.97, [0, 1, 2])):
        assert top_p(weights.log(), near.log(), tau, None).nonzero()[:, 0].tolist() == wanted, tau


@pytest.mark.parametrize("tau", [0.5, 1])
def test_a_cap_is_kept(tau: float) -> None:
    scores = torch.randn(3, 2, 200) * 0.01
    kept = top_p(scores, torch.full((3, 2), -torch.inf), tau, 7)
    assert kept.sum(-1).flatten().tolist() == [7] * 6
    assert (scores[kept].view(3, 2, 7).min(-1).values >= scores.masked_fill(kept, -9).max(-1).values).all()


def test_absent_entries_are_never_kept() -> None:
    scores = torch.randn(4, 30)
    scores[:, 20:] = -torch.inf
    scores[3] = -torch.inf
    for tau in (0.9, 1.0):
        kept = top_p(scores, torch.full((4,), -torch.inf), tau, None)
        assert not kept[:, 20:].any()
        assert not kept[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("d", [16, 64, 12])
def test_weighted_sum_is_what_the_textbook_says(dtype: torch.dtype, planes: int, d: int) -> None:
    memory = torch.randn(9, 2, planes, 8, d).to(dtype)
    values, table = memory[:, :, -1], torch.tensor([[[3, 0, 7]], [[8, 1, 2]]], dtype=torch.int32)
    index, count = torch.randint(0, 24, (2, 2, 10), dtype=torch.int32), torch.tensor([[10, 0], [3, 7]]).int()
    weights = torch.rand(2, 6, 10)
    assert (native.refuses(ValueBlocks.of(values)) is None) == (d != 12)
    exact = torch.zeros(2, 6, d, dtype=torch.float64)
    for seq in range(2):
        for head in range(6):
            for i in range(int(count[seq, head // 3])):
                p = int(index[seq, head // 3, i])
                row = values[int(table[seq, 0, p // 8]), head // 3, p % 8]
                exact[seq, head] += weights[seq, head, i].double() * row.double()
    for way in (reference, weighted_sum):
        torch.testing.assert_close(way(weights, index, count, values, table).double(), exact, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("d", [16, 64, 128, 12])
def test_weighted_sum_of_values_in_few_bits(form: str, d: int) -> None:
    values, table = torch.randn(9, 2, 8, d), torch.tensor([[[3, 0, 7]], [[8, 1, 2]]], dtype=torch.int32)
    packed = pack_values(values, form)
    index, count = torch.randint(0, 24, (2, 2, 10), dtype=torch.int32), torch.tensor([[10, 0], [3, 7]]).int()
    weights = torch.rand(2, 6, 10)
    blocks = ValueBlocks(packed, form, 8, d)
    assert (native.refuses(blocks) is None) == (d != 12)
    want = reference(weights, index, count, unpack_values(packed, form, 8, d, torch.float32), table)
    got = weighted_sum(weights, index, count, blocks, table)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_no_entries_sum_to_nothing() -> None:
    index, table = torch.zeros(1, 2, 0, dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int32)
    out = weighted_sum(
        torch.zeros(1, 4, 0), index, torch.zeros(1, 2, dtype=torch.int32), torch.randn(1, 2, 8, 16), table
    )
    assert torch.equal(out, torch.zeros(1, 4, 16))


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("tau", [0.3, 0.9, 0.999])
def test_top_p_of_many_entries_is_that_of_a_full_sort(spread: float, tau: float) -> None:
    scores, near = torch.randn(3, 4, 3000) * spread, torch.randn(3, 4)
    weights = torch.cat([scores, near[..., None]], -1).double().softmax(-1)
    ordered = weights[..., :-1].sort(dim=-1, descending=True).values
    needed = (weights[..., -1:] + ordered.cumsum(-1) - ordered < tau).sum(-1)
    kept = top_p(scores, near, tau, None)
    assert ((kept.sum(-1) - needed).abs() <= 1).all()  # rounding may move the border by an entry
    assert (scores.masked_fill(~kept, 99).amin(-1) > scores.masked_fill(kept, -99).amax(-1)).all()
