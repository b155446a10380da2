"""Projections that share a matrix while a step is recorded, and have their own again afterwards."""

import pytest
import torch
from torch import nn

from coattn.hf.fuse.siblings import find_siblings


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 8, bias=bias)
        self.k_proj = nn.Linear(12, 4, bias=bias)
        self.v_proj = nn.Linear(12, 4, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_one_product_gives_what_each_gives(bias: bool, inference: bool) -> None:
    module = Attention(bias)
    names = ("q_proj", "k_proj", "v_proj")
    x = torch.randn(1, 3, 12)
    want = [getattr(module, name)(x) for name in names]
    weights = [getattr(module, name).weight.detach().clone() for name in names]
    with torch.inference_mode(inference):
        siblings = find_siblings(module)[0]
        with siblings.active():
            got = [getattr(module, name)(x) for name in reversed(names)][::-1]
        torch.testing.assert_close(got, want)
        siblings.part()
    for name, weight in zip(names, weights, strict=True):
        own = getattr(module, name)
        assert torch.equal(own.weight, weight)
        assert "forward" not in own.__dict__
        assert not own.weight.is_inference()
    storages = {getattr(module, name).weight.untyped_storage().data_ptr() for name in names}
    assert len(storages) == 3
    module.q_proj(x).sum().backward()


def test_projections_that_differ_are_left_alone() -> None:
    module = Attention(False)
    module.k_proj = nn.Linear(12, 4, bias=True)
    assert find_siblings(module) == []
    module.k_proj = nn.Linear(10, 4, bias=False)
    assert find_siblings(module) == []
