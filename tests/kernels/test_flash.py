"""Many queries over blocks against the reference, and what is left to others."""

import pytest
import torch

from coattn.kernels import flash
from coattn.kernels.attend import reference
from coattn.types import BlockList


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "PIECE", 64)
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    blocks = torch.randn(12, 2, 2, 16, 32).to(dtype)
    picked = BlockList(torch.randperm(12).int().view(1, 1, 12), torch.tensor([[183]]).int(), 183)
    q = torch.randn(1, 70, 6, 32).to(dtype)
    assert flash.refuses(q, blocks, picked, None) is None
    got, want = flash.attend(q, blocks, picked, 0.2), reference(q, blocks, picked, 0.2, None)
    torch.testing.assert_close(got.out.float(), want.out, atol=bound, rtol=bound)
    torch.testing.assert_close(got.lse, want.lse, atol=bound, rtol=bound)


def test_what_it_leaves_to_others() -> None:
    blocks, shared = torch.randn(4, 2, 2, 16, 32), torch.zeros(1, 1, 4).int()
    picked = BlockList(shared, torch.tensor([[64]]).int(), 64)
    many, few = torch.randn(1, 100, 4, 32), torch.randn(1, 5, 4, 32)
    assert flash.refuses(many, blocks, picked, None) is None
    assert flash.refuses(many, blocks, picked, 30.0) is not None
    assert flash.refuses(few, blocks, picked, None) is not None
    assert flash.refuses(many.expand(2, -1, -1, -1), blocks, picked, None) is not None
    each_head = BlockList(shared.expand(-1, 2, -1), torch.full((1, 2), 64).int(), 64)
    assert flash.refuses(many, blocks, each_head, None) is not None
