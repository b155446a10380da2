"""`rest`: kernels against PyTorch."""

import pytest
import torch

from coattn.kernels import rest as plain
from coattn.kernels.quantise.sketch import Sketcher, fit, spread_of
from coattn.kernels.rest import Rest, width

pytest.importorskip("triton")
from coattn.kernels.triton import rest as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 2
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # which the interpreter has no products of


@pytest.mark.parametrize(
    ("d", "group", "planes", "dtype", "cap"),
    [
        (64, 7, 128, torch.float32, None),
        (80, 2, 192, HALF, 30.0),
        (128, 1, 256, torch.float16, None),
        (16, 3, 32, torch.float32, 5.0),
    ],
)
def test_sums_and_what_stands_in(d: int, group: int, planes: int, dtype: torch.dtype, cap: float | None) -> None:
    torch.manual_seed(0)
    n, block, slots = 700, 16, 3
    keys = torch.randn(n, HEADS, d) * torch.logspace(0.3, -1, d) + 2 * torch.randn(HEADS, d)
    values = (torch.einsum("nhd,hde->nhe", keys, torch.randn(HEADS, d, d) * d**-0.5) + torch.randn(HEADS, d)).to(dtype)
    made, k = fit(spread_of(keys, None), planes), keys.to(dtype)
    parts = made.tensors()
    here = Sketcher(*(x.to(dtype) if x.ndim == 3 else x for x in parts))
    there = Sketcher(*(x.to(DEVICE) for x in here.tensors()))
    want = plain.sum_rest(k, values, here)
    # products of 16-bit numbers round their sums
    close = {"atol": 2e-4, "rtol": 2e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    got = kernel.sum_rest(k.to(DEVICE), values.to(DEVICE), there)
    torch.testing.assert_close(got.cpu() / n, want / n, **close)
    assert not kernel.sum_rest(k[:0].to(DEVICE), values[:0].to(DEVICE), there).any()

    sums = want.repeat(slots, 1, 1)
    own = sums.to(DEVICE, copy=True)
    gpu = torch.stack([k[: 5 * block], values[: 5 * block]], 2).view(5, block, HEADS, 2, d)
    gpu = gpu.permute(0, 2, 3, 1, 4).contiguous()
    book = [torch.tensor(x, dtype=torch.int32) for x in ([3, 0, 4], [9, -1, 2], [2, 1, 0])]
    plain.flush_rest(gpu, sums, *book, here)
    kernel.flush_rest(gpu.to(DEVICE), own, *(x.to(DEVICE) for x in book), there)
    torch.testing.assert_close(own[1].cpu(), want)
    torch.testing.assert_close(own.cpu() / n, sums / n, **close)

    q = torch.randn(2, HEADS * group, d).to(dtype)
    for shift, wait in ((-8.0, 0.0), (0.0, 1.0), (3.0, 2.0), (100.0, 0.0), (-torch.inf, 0.0)):
        bound, waits = torch.full((2, HEADS * group), shift), torch.tensor([wait, 0.5])
        seq = torch.tensor([2, 1], dtype=torch.int32)
        # of several pieces, of which one is written
        out, pieces = torch.empty(2, HEADS * group, d), torch.zeros(2, 3, HEADS * group, d, device=DEVICE)
        plain.rest_value(q, Rest(sums, here), bound, waits, seq, d**-0.5, cap, out)
        args = (x.to(DEVICE) for x in (bound, waits, seq))
        kernel.rest_value(q.to(DEVICE), Rest(sums.to(DEVICE), there), *args, d**-0.5, cap, pieces[:, 2])
        assert not pieces[:, :2].any()
        least = 1e-3 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(pieces[:, 2].cpu(), out, atol=least, rtol=least)
    assert sums.shape[-1] == width(d)
