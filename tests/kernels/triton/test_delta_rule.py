"""One token through a gated delta rule: the kernel against its reference."""

import pytest
import torch
from torch import Tensor

from coattn.kernels.delta_rule import DeltaWeights, delta_rule
from coattn.kernels.triton.delta_rule import delta_rule as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 7


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "k", "v", "taps", "bias"), [(2, 6, 16, 16, 4, False), (1, 2, 24, 8, 3, True)]
)
def test_a_token_of_three_sequences(k_heads: int, v_heads: int, k: int, v: int, taps: int, bias: bool) -> None:
    channels = 2 * k_heads * k + v_heads * v
    own = DeltaWeights(
        random(channels, taps, seed=0),
        random(channels, seed=1) if bias else None,
        *(random(v_heads, seed=seed) for seed in (2, 3)),
        random(v, seed=4),
        1e-6,
    )
    x = random(3, channels + v_heads * v + 2 * v_heads, seed=5)
    conv, state = random(ROWS, channels, taps, seed=6), random(ROWS, v_heads, k, v, seed=7)
    read, write = (torch.tensor(rows, dtype=torch.int32, device=DEVICE) for rows in ((0, 3, 5), (1, 2, 4)))
    before, made = (conv.clone(), state.clone()), (conv.clone(), state.clone())
    want = delta_rule.reference(x, own, conv, state, read, write)
    got = kernel(x, own, *made, read, write)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    for each, other, old in zip(made, (conv, state), before, strict=True):
        torch.testing.assert_close(each, other, atol=1e-5, rtol=1e-4)
        assert torch.equal(each[[0, 3, 5, 6]], old[[0, 3, 5, 6]]), "what is read, and what is nobody's, stays"
        assert not torch.equal(each[[1, 2, 4]], old[[1, 2, 4]])
