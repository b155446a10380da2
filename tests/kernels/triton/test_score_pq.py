"""Scores from codes: the kernel against the reference, for every form of codes."""

from __future__ import annotations

import pytest
import torch

from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.pack import pack
from coattn.kernels.score_pq import score_pq

pytest.importorskip("triton")
from coattn.kernels.triton import score_pq as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("bits", "groups", "width", "group", "shared", "softcap", "dtype"),
    [
        (12, 8, 2, 1, True, None, torch.float32),
        (13, 5, 4, 3, False, None, torch.float32),
        (16, 5, 4, 3, False, None, torch.float32),
        (12, 16, 4, 4, True, 5.0, torch.bfloat16),
        (16, 16, 4, 4, True, 5.0, torch.bfloat16),
        (13, 3, 8, 5, True, None, torch.float16),
    ],
)
def test_score_pq(
    bits: int, groups: int, width: int, group: int, shared: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    kv_heads, block, count = 2, 8, 300
    book = Codebook(torch.randn(1 if shared else groups, count, width).to(DEVICE, dtype), groups)
    codes = torch.randint(0, count, (6, kv_heads, block, groups)).short().to(DEVICE)
    kept = codes if bits == 16 else pack(codes, bits)
    q = torch.randn(3, kv_heads * group, groups * width).to(DEVICE, dtype)
    table = torch.tensor([[3, 0, 5], [4, 0, 0], [1, 2, 0]], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([19, 0, 16], dtype=torch.int32, device=DEVICE)
    got = kernel.score_codes(q, kept, table, tokens, book, bits, 0.3, softcap)
    want = score_pq.reference(q, kept, table, tokens, book, bits, 0.3, softcap)
    assert got.shape == want.shape == (3, kv_heads, group, 24)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert (got[1] == -torch.inf).all()


def test_blocks_of_another_size_are_refused() -> None:
    assert kernel.refuses(torch.zeros(1, 1, 12, 4)) is not None
    assert kernel.refuses(torch.zeros(1, 1, 32, 4)) is None
