"""Linear layers over a few tokens and weights in 4 bits: right, the same every time, refused where they do not fit."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.cards import CARDS, fits
from tests.kernels.cuda.emulator import modules

from coattn.kernels.cuda import nvrtc, product_packed
from coattn.kernels.packed_linear import packed_linear
from coattn.kernels.quantise.weights import Packed, pack, unpack

SCALES = (torch.float16, torch.bfloat16, torch.float32)


def matrix(n: int, k: int, group: int, scales: torch.dtype, zeros: bool) -> Packed:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    some = torch.rand(k // group, n).add(0.5).div(8 * k**0.5).to(scales)
    middle = torch.randint(5, 11, some.shape, dtype=torch.int8) if zeros else None
    return pack(codes, some, middle, "int4", group)


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", [card for card in CARDS if card >= 90])
@pytest.mark.parametrize(("n", "scales", "flag"), [(4096, 0, 0), (28672, 1, 1), (51200, 2, 1)])
def test_compiles(n: int, scales: int, flag: int, card: int) -> None:
    source = (Path(nvrtc.__file__).parent / "product_packed.cu").read_text()
    made = product_packed.cut(n, 132)
    form = {
        "WARPS": made.warps, "STAGES": product_packed.STAGES, "TILES": made.tiles, "GROUPS": 1, "SHARED_SPANS": 1,
        "SCALES": scales, "ZEROS": flag, "OFFSET": 8, "BIAS": flag, "RESIDUAL": flag, "F16": flag,
    }  # fmt: skip
    assert fits(source, form, card, 32 * made.warps)


@pytest.mark.parametrize("processors", [1, 78, 132])
@pytest.mark.parametrize("n", [16, 48, 4096, 7168, 28672, 51200])
def test_cut(n: int, processors: int) -> None:
    made = product_packed.cut(n, processors)
    assert made.programs <= processors
    assert 1 <= made.tiles <= (7 if made.warps == 8 else 4)
    assert made.shared <= 227 << 10, "of a multiprocessor of compute capability 9"


def test_refused_without_a_gpu() -> None:
    assert product_packed.refuses(torch.zeros(4, 128), matrix(16, 128, 128, torch.float16, zeros=False)) is not None


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("n", "k", "group", "tokens", "processors", "dtype"),
    [
        (96, 640, 128, 3, 4, torch.bfloat16),  # programs with one tile and with two
        (8192 + 16, 256, 256, 1, 37, torch.float16),  # several passes, of which the last is shorter
        (16, 2304, 128, 8, 1, torch.bfloat16),  # more spans than warps
    ],
)
@pytest.mark.parametrize("flag", [False, True])
def test_emulated(
    n: int, k: int, group: int, tokens: int, processors: int, dtype: torch.dtype, flag: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    monkeypatch.setattr(product_packed, "module", modules(tmp_path_factory.getbasetemp()))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=processors)
    )
    weight = matrix(n + 32, k, group, SCALES[flag], zeros=flag).between(16, n + 16)
    x = torch.randn(1, tokens, k + 8).to(dtype)[..., :k]
    b, r = (torch.randn(*size, n).to(dtype) if flag else None for size in ((), (1, tokens)))
    got = product_packed.product_packed(x, weight, b, r)
    want = x.double() @ unpack(weight, torch.float64).T
    want = want if b is None or r is None else want + b.double() + r.double()
    size = want.abs().max() + (0 if r is None else r.abs().max())
    assert (got.double() - want).abs().max() < 2.5 * torch.finfo(dtype).eps * size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(4096, 4096, 128), (28672, 4096, 128), (1056, 640, 128), (48, 256, 256), (5120, 25600, 128)]
)
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, True)])
def test_product(n: int, k: int, group: int, tokens: int, bias: bool, residual: bool, dtype: torch.dtype) -> None:
    if not product_packed.own_products():
        pytest.skip("made for compute capability 9")
    for scales in SCALES:
        whole = matrix(n, k, group, scales, zeros=scales != torch.float32)
        weight = whole._replace(**{name: x.cuda() for name, x in whole.tensors.items()})
        x = torch.randn(1, tokens, k + 8, device="cuda").to(dtype)[..., :k]
        b = torch.randn(n, device="cuda").to(dtype) if bias else None
        r = torch.randn(1, tokens, n, device="cuda").to(dtype) if residual else None
        assert product_packed.refuses(x, weight) is None
        got = packed_linear(x, weight, b, r)
        assert torch.equal(got, packed_linear(x, weight, b, r))
        want = x.double() @ unpack(weight, torch.float64).T + (0 if b is None else b.double())
        want = want if r is None else want + r.double()
        # two roundings, of numbers of the size of what is added; float32 sums in which codes are 128 too large
        error = (got.double() - want).abs().max() / (want.abs().max() + (0 if r is None else r.abs().max()))
        assert error < 2.5 * torch.finfo(dtype).eps
        alone = packed_linear(x[:, :1], weight, b, None if r is None else r[:, :1])
        assert torch.equal(alone, got[:, :1]), "a token does not see the others"
        part = packed_linear(
            x, weight.between(16, n), None if b is None else b[16:], None if r is None else r[..., 16:]
        )
        assert torch.equal(part, got[..., 16:]), "rows of a larger matrix"
