"""The kernels of linear layers in 4 and 8 bits: on the GPU where there is one, else under Triton's interpreter."""

import pytest
import torch
from tests.kernels.quantised_weights import FORMS, Form, random_packed

pytest.importorskip("triton")
from coattn.kernels.triton import packed_linear as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
"""The interpreter multiplies no bfloat16."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 40, 128), (5, 48, 192), (32, 33, 512)])
def test_products(tokens: int, n: int, k: int, form: str, dtype: torch.dtype) -> None:
    """The error is at most twice that of the product of the numbers in the same precision."""
    weight, numbers = random_packed(FORMS[form], n, k, DEVICE)
    x, bias, r = (torch.randn(*s, device=DEVICE).to(dtype) for s in ((1, tokens, k), (n,), (1, tokens, n)))
    want = x.double() @ numbers.T + bias.double()
    plain = torch.nn.functional.linear(x, numbers.to(dtype), bias)
    for given in (None, r):
        got = kernel.packed_linear(x, weight, bias, given)
        exact = want if given is None else want + given.double()
        usual = plain if given is None else given + plain
        assert got.dtype == dtype
        worst = (usual.double() - exact).abs().max()
        assert (got.double() - exact).abs().max() <= 2 * worst
    assert kernel.refuses(x, weight) is None


@pytest.mark.parametrize("tile", [(32, 4), (16, 8)])
@pytest.mark.parametrize("form", FORMS)
def test_unpacked(form: str, tile: tuple[int, int]) -> None:
    weight, numbers = random_packed(FORMS[form], 40, 192, DEVICE)
    assert all(torch.equal(kernel.unpack(weight, dtype, tile), numbers.float().to(dtype)) for dtype in DTYPES)


def test_others_are_unpacked_first() -> None:
    weight, _ = random_packed(FORMS["int4"], 40, 192, DEVICE)
    x = torch.randn(33, 192, dtype=torch.bfloat16, device=DEVICE)
    assert "33 tokens" in (kernel.refuses(x, weight) or "")
    assert "float32" in (kernel.refuses(x[:1].float(), weight) or "")
    weight, _ = random_packed(Form("int4", 8, 1), 40, 192, DEVICE)
    assert "8 columns" in (kernel.refuses(x[:1], weight) or "")
