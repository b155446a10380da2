"""Attention of prompts: every kernel that runs here against the reference, in pieces too, and how one is chosen."""

import pytest
import torch
from tests.dense import dense

from coattn.kernels.prompt import Mask, attend_prompt, choice, kernels
from coattn.kernels.prompt import attend as attending
from coattn.kernels.prompt.choice import flaw
from coattn.kernels.prompt.kernels import KERNELS, Kernel
from coattn.kernels.prompt.mask import Shape
from coattn.kernels.prompt.reference import reference
from coattn.state import AttnState

MASKS = [
    Mask(),
    Mask(False),
    Mask(softcap=6.0),
    Mask(False, softcap=6.0),
    Mask(window=50),
    Mask(window=50, sinks=7),
    Mask(window=3, sinks=100, softcap=6.0),
    Mask(window=500, sinks=2),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tokens", "keys"), [(70, 70), (70, 190), (1, 190), (300, 300)])
def test_equals_the_reference(device: torch.device, mask: Mask, tokens: int, keys: int) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q = torch.randn(tokens, 6, 32, device=device).to(dtype)
        k, v = torch.randn(2, keys, 2, 32, device=device).to(dtype)
        got = attend_prompt(q, k, v, 0.2, mask)
        want = reference(q, k, v, 0.2, mask)
        torch.testing.assert_close(got.out.float(), want.out, atol=bound, rtol=bound)
        torch.testing.assert_close(got.lse, want.lse, atol=1e-4, rtol=1e-4)


def test_nothing_to_attend_to() -> None:
    q, none = torch.randn(5, 4, 16), torch.empty(0, 2, 16)
    state = attend_prompt(q, none, none, 0.2, Mask(False))
    assert not state.out.any()
    assert bool((state.lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("causal", "tokens", "keys"), [(True, 87, 87), (True, 87, 150), (False, 71, 113), (True, 8, 8)]
)
def test_tiles_and_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, causal: bool, tokens: int, keys: int) -> None:
    """The way a kernel that takes few shapes is used, with the reference in its place."""
    asked = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask) -> AttnState:
        asked.append((len(q), len(k)))
        return reference(q, k, v, scale, Mask(mask.causal))

    for where in (kernels, attending):
        monkeypatch.setattr(where, "TILES", (32, 16, 8))
        monkeypatch.setattr(where, "PIECES", (64, 32, 16, 8))
    fake = Kernel("fake", lambda _: None, run)
    monkeypatch.setattr(attending, "tile_kernel", lambda _: fake)
    monkeypatch.setattr(attending, "best", lambda _: KERNELS[-1])
    q, (k, v) = torch.randn(tokens, 6, 16), torch.randn(2, keys, 3, 16)
    got = attend_prompt(q, k, v, 0.3, Mask(causal))
    want = reference(q, k, v, 0.3, Mask(causal))
    torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)
    assert {t for t, _ in asked} <= {32, 16, 8}
    assert {n for _, n in asked} <= {64, 32, 16, 8}
    assert len(asked) > 1 or tokens == 8


def test_a_kernel_with_wrong_numbers_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KERNELS[-1]

    def base_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask) -> AttnState:
        state = right.run(q, k, v, scale, mask)
        return AttnState(state.out, state.lse / 0.6931)

    def swapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask) -> AttnState:
        state = right.run(q, k, v, scale, mask)
        return AttnState(state.out.flip(1), state.lse)

    def broken(*_: object) -> AttnState:
        raise RuntimeError("no engine\nfor this")

    wrong = [Kernel(f.__name__, lambda _: None, f) for f in (base_two, swapped, broken)]
    monkeypatch.setattr(choice, "KERNELS", (*wrong, Kernel("right", lambda _: None, right.run), right))
    monkeypatch.setattr(choice, "LEAST_TOKENS", 16)
    shape = Shape(torch.device("cpu"), torch.float32, 4, 2, 16, 64, 64)
    found = {kernel.name: flaw(kernel, shape) for kernel in choice.KERNELS}
    assert "log-sum-exp differs" in (found["base_two"] or "")
    assert "output" in (found["swapped"] or "")
    assert found["broken"] == "no engine for this"
    assert found["right"] is None
    assert [kernel.name for kernel in choice.KERNELS[:-1] if choice.is_right(kernel, shape)] == ["right"]


def gpu(tokens: int, keys: int, mask: Mask, dtype: torch.dtype = torch.bfloat16) -> Shape:
    return Shape(torch.device("cuda"), dtype, 32, 8, 128, tokens, keys, mask)


@pytest.mark.parametrize(
    ("generation", "broken", "tiles", "others"),
    [
        ((9, 0), (), "cudnn", "own"),
        ((9, 0), ("cudnn",), None, "own"),
        ((9, 0), ("cudnn", "own"), None, "flash"),
        ((12, 0), (), "cudnn", "own"),
        ((8, 6), (), None, "flash"),
        ((8, 6), ("flash",), None, "own"),
    ],
)
def test_the_choice_hangs_on_the_gpu_and_the_shape_and_on_no_clock(
    generation: tuple[int, int],
    broken: tuple[str, ...],
    tiles: str | None,
    others: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: set[Shape] = set()

    def is_right(kernel: Kernel, shape: Shape) -> bool:
        tried.add(shape)
        return kernel.name not in broken

    monkeypatch.setattr(choice, "capability", lambda _: generation)
    monkeypatch.setattr(choice, "is_right", is_right)
    found = choice.tile_kernel(gpu(5000, 40000, Mask()))
    assert (found.name if found else None) == tiles
    assert choice.best(gpu(2048, 2048, Mask())).name == (tiles or others)
    for tokens, keys in ((130, 130), (900, 40000), (1800, 70000)):
        assert choice.best(gpu(tokens, keys, Mask())).name == others
    assert max(shape.tokens * shape.keys for shape in tried) <= 2048 * 2048, "a try is small"
    assert choice.best(gpu(900, 9000, Mask(softcap=30.0))).name == "own", "nobody else has it"
    assert choice.tile_kernel(gpu(1500, 40000, Mask())) is None
    assert choice.tile_kernel(gpu(5000, 40000, Mask(), torch.float32)) is None
    assert choice.tile_kernel(gpu(5000, 40000, Mask(window=10))) is None


def test_a_kernel_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask) -> AttnState:
        calls.append((len(q), len(k)))
        return KERNELS[-1].run(q, k, v, scale, mask)

    kernel = Kernel("counted", lambda _: None, run)
    shape = Shape(torch.device("cpu"), torch.float32, 4, 2, 16, 64, 64)
    assert choice.is_right(kernel, shape)
    assert choice.is_right(kernel, shape)
    assert calls == [(64, 64)]


def test_against_float64() -> None:
    q, (k, v) = torch.randn(100, 6, 32), torch.randn(2, 100, 3, 32)
    torch.testing.assert_close(attend_prompt(q, k, v, 0.2).out, dense(q, k, v, 0.2).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [Mask(), Mask(False), Mask(window=700), Mask(window=700, sinks=4), Mask(softcap=30.0)])
def test_every_kernel_of_a_gpu(mask: Mask) -> None:
    """Shapes of an 8B model: whoever takes one must be right, and for plain masks cuDNN and flash both do."""
    keys = 2048 if mask.causal else 4096
    shape = Shape(torch.device("cuda"), torch.bfloat16, 32, 8, 128, 2048, keys, mask)
    found = {kernel.name: flaw(kernel, shape) for kernel in KERNELS}
    for kernel in KERNELS:
        assert kernel.refuses(shape) == found[kernel.name]
    assert found["own"] is None
    if mask.plain:
        assert found["flash"] is None


@pytest.mark.gpu
def test_ragged_lengths_on_a_gpu() -> None:
    for tokens, keys in ((2048 + 700, 2048 + 700), (4096 + 3, 9000), (100, 5000)):
        q = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, keys, 2, 128, device="cuda", dtype=torch.bfloat16)
        for mask in (Mask(), Mask(False)):
            got = attend_prompt(q, k, v, 0.09, mask)
            want = reference(q, k, v, 0.09, mask)
            assert float((got.lse - want.lse).abs().max()) < 1e-3
            assert float((got.out.float() - want.out).norm() / want.out.norm()) < 1e-2
