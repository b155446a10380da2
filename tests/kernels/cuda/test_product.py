"""Linear layers over a few tokens: right, the same whatever else is in the batch, and refused where they do not fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.kernels.cards import CARDS, fits

from coattn.kernels.cuda import nvrtc, product
from coattn.kernels.linear import linear


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("n", [4096, 34816])
def test_compiles(n: int, tokens: int, flag: int, card: int) -> None:
    source = (Path(nvrtc.__file__).parent / "product.cu").read_text()
    made = product.cut(n, tokens, 132)
    form = {"WARPS": made.warps, "STAGES": made.stages, "TILES": made.tiles, "TOKENS": tokens}
    assert fits(source, {**form, "BIAS": flag, "RESIDUAL": flag, "F16": flag}, card, 32 * made.warps)


@pytest.mark.parametrize("processors", [1, 78, 132])
@pytest.mark.parametrize("room", [8, 16])
@pytest.mark.parametrize("n", [8, 48, 4096, 7168, 34816, 151936])
def test_cut(n: int, room: int, processors: int) -> None:
    made = product.cut(n, room, processors)
    assert made.programs <= min(processors, n // 8)
    warps, tiles, stages = product.warps_of(n)
    assert made.warps == warps
    assert 1 <= made.tiles <= tiles
    assert 3 <= made.stages <= stages
    assert made.shared <= product.SHARED


def test_refused_without_a_gpu() -> None:
    assert product.refuses(torch.zeros(4, 64), torch.zeros(64, 64)) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 12288), (7168, 5120), (8, 32), (1048, 544), (34816, 256)])
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, True), (False, True)])
def test_product(n: int, k: int, tokens: int, bias: bool, residual: bool, dtype: torch.dtype) -> None:
    _needs_ours()
    x = torch.randn(1, tokens, k + 8, device="cuda").to(dtype)[..., :k]
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    b = torch.randn(n, device="cuda").to(dtype) if bias else None
    r = torch.randn(1, tokens, n, device="cuda").to(dtype) if residual else None
    assert product.refuses(x, w) is None
    got = linear(x, w, b, r)
    assert torch.equal(got, linear(x, w, b, r))
    want = x.double() @ w.double().T + (0 if b is None else b.double())
    if r is not None:
        want = want + r.double()
    # two roundings, of numbers of the size of what is added
    error = (got.double() - want).abs().max() / (want.abs().max() + (0 if r is None else r.abs().max()))
    assert error < 2 * torch.finfo(dtype).eps


def test_many_tokens_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "own_products", lambda: True)
    x, w = (torch.empty(*size, dtype=torch.bfloat16) for size in ((17, 64), (16, 64)))
    like = cast("torch.Tensor", SimpleNamespace(
        device=SimpleNamespace(type="cuda"), shape=x.shape, dtype=x.dtype, numel=x.numel, stride=x.stride, data_ptr=int
    ))  # fmt: skip
    assert product.refuses(like, w) == "there are 17 tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [6144, 18_432])
def test_a_token_does_not_see_the_others(n: int) -> None:
    _needs_ours()
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    w = torch.randn(n, 4096, device="cuda").bfloat16()
    whole = linear(x, w, None)
    for tokens in (2, 5, 8, 9):
        assert torch.equal(linear(x[:tokens], w, None), whole[:tokens])
    x[3] = torch.nan
    others = linear(x, w, None)
    assert torch.equal(others[:3], whole[:3])
    assert torch.equal(others[4:], whole[4:])


@pytest.mark.gpu
def test_what_does_not_fit_goes_elsewhere() -> None:
    _needs_ours()
    half = torch.bfloat16
    x, w = torch.randn(4, 64, device="cuda", dtype=half), torch.randn(24, 64, device="cuda", dtype=half)
    for bad_x, bad_w in ((x[:1], w), (x.float(), w.float()), (x, w[:20]), (x[:, :40], w[:, :40].contiguous())):
        assert product.refuses(bad_x, bad_w) is not None
        torch.testing.assert_close(linear(bad_x, bad_w, None), bad_x @ bad_w.T, atol=0.1, rtol=0.02)


def _needs_ours() -> None:
    from coattn.kernels.triton.launch import own_products

    if not own_products():
        pytest.skip("made for compute capability 9")
