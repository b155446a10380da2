"""The kernels for prompts against their references: on the GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

from coattn.kernels.prompt import Mask
from coattn.kernels.prompt.reference import reference
from coattn.state import AttnState, merge

pytest.importorskip("triton")
from coattn.kernels.triton.attend_prompt import attend_prompt
from coattn.kernels.triton.merge_rows import merge_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("tokens", "keys", "mask"),
    [
        (130, 130, Mask()),
        (130, 300, Mask()),
        (1, 77, Mask()),
        (140, 70, Mask(False)),
        (140, 128, Mask(False, softcap=5.0)),
        (200, 333, Mask(softcap=5.0)),
        (150, 260, Mask(window=40)),
        (150, 260, Mask(window=40, sinks=70, softcap=8.0)),
        (260, 260, Mask(window=1, sinks=3)),
        (70, 200, Mask(window=64, sinks=4)),
    ],
)
@pytest.mark.parametrize(("group", "d"), [(3, 64), (1, 80)])
def test_own_kernel(tokens: int, keys: int, mask: Mask, group: int, d: int) -> None:
    q = torch.randn(tokens, 2 * group, d, device=DEVICE)
    k, v = torch.randn(2, 2, keys, d, device=DEVICE).transpose(1, 2)
    got = attend_prompt(q, k, v, 0.3, mask)
    want = reference(q, k, v, 0.3, mask)
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_merge_rows(count: int) -> None:
    states = []
    for i in range(count):
        out = torch.randn(6, 9, 48, device=DEVICE).to(torch.bfloat16 if i % 2 else torch.float32).transpose(0, 1)
        lse = torch.randn(6, 9, device=DEVICE).transpose(0, 1).clone()
        lse[i % 9] = -torch.inf
        if i == 1:
            out[1] = torch.nan  # of an empty set nothing but its lse counts
        states.append(AttnState(out, lse))
    got = merge_rows(states, torch.float32)
    clean = [AttnState(s.out.float().nan_to_num(), s.lse) for s in states]
    want = merge(*clean)
    if count == 1:
        want = AttnState(want.out.masked_fill((want.lse == -torch.inf)[..., None], 0.0), want.lse)
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)
    out, lse = torch.zeros(20, 6, 48, device=DEVICE), torch.zeros(20, 6, device=DEVICE)
    merge_rows(states, torch.float32, (out[4:13], lse[4:13]))
    assert torch.equal(out[4:13], got.out)
    assert torch.equal(lse[4:13], got.lse)
    assert not out[:4].any()
    assert not out[13:].any()
