"""Experts in 4 to 8 bits: their plain meaning, and the kernels over a few tokens, under Triton's interpreter without a
GPU."""

import pytest
import torch
from tests.kernels.quantised_weights import FORMS, random_packed
from torch import Tensor
from torch.nn import functional

from coattn.hf.quantised.formats import stack
from coattn.kernels.packed_experts import packed_experts
from coattn.kernels.quantise.weights import Packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, HIDDEN, INNER, TOP = 5, 128, 64, 2
SOME = ["int4", "int4 zeros", "int6 supers", "fp4", "int8", "fp8", "fp8 blocks"]


def silu_times(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def matrices(form: str, n: int, k: int) -> tuple[Packed, Tensor]:
    """Of all experts, packed and in float64 `[experts, n, k]`."""
    each = [random_packed(FORMS[form], n, k, DEVICE, seed=i) for i in range(EXPERTS)]
    return stack([weight for weight, _ in each]), torch.stack([numbers for _, numbers in each])


def given(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, experts and their weights; some experts are shared, and one of three tokens is like the first."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP]
    weights = torch.rand(tokens, TOP, generator=generator)
    return x.to(DEVICE, dtype), index.to(DEVICE), weights.to(DEVICE, dtype)


def textbook(x: Tensor, index: Tensor, weights: Tensor, first: Tensor, second: Tensor, biases: list[Tensor]) -> Tensor:
    """In the dtype of the matrices."""
    rows = []
    for token, experts, worth in zip(x.to(first.dtype), index.tolist(), weights.to(first.dtype), strict=True):
        each = [second[e] @ silu_times(first[e] @ token + biases[0][e]) + biases[1][e] for e in experts]
        rows.append((torch.stack(each) * worth[:, None]).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("form", SOME)
def test_one_expert_after_the_other(form: str) -> None:
    (first, a), (second, b) = (
        matrices(form, 2 * INNER, HIDDEN),
        matrices(form, HIDDEN, INNER if "blocks" not in form else 128),
    )
    if "blocks" in form:
        (first, a) = matrices(form, 256, HIDDEN)
    biases = [torch.randn(EXPERTS, each.shape[1], dtype=torch.float64, device=DEVICE) for each in (a, b)]
    x, index, weights = given(7, torch.float32)
    got = packed_experts(x, index, weights, (first, biases[0].float()), (second, biases[1].float()), silu_times)
    want = textbook(x, index, weights, a, b, biases)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("form", SOME)
def test_a_few_tokens_in_kernels(form: str, tokens: int) -> None:
    """The error is at most twice that of the numbers in the same precision."""
    pytest.importorskip("triton")
    from coattn.kernels.triton import packed_experts as kernel

    inner = 128 if "blocks" in form else INNER
    (first, a), (second, b) = matrices(form, 2 * inner, HIDDEN), matrices(form, HIDDEN, inner)
    biases = [torch.randn(EXPERTS, each.shape[1], device=DEVICE).half() for each in (a, b)]
    x, index, weights = given(tokens, torch.float16)
    assert kernel.refuses(x, index, first, second) is None
    got = kernel.packed_experts(x, index, weights, (first, biases[0]), (second, biases[1]), silu_times)
    want = textbook(x, index, weights, a, b, [bias.double() for bias in biases])
    usual = textbook(x, index, weights, a.half(), b.half(), biases)
    assert (got - want).abs().max() <= 2 * (usual.double() - want).abs().max()


def test_others_are_unpacked_one_by_one() -> None:
    pytest.importorskip("triton")
    from coattn.kernels.triton import packed_experts as kernel

    first, _ = matrices("int4", 2 * INNER, HIDDEN)
    x, index, _ = given(300, torch.float16)
    assert "600 rows" in (kernel.refuses(x, index, first) or "")
    assert "float32" in (kernel.refuses(x[:1].float(), index[:1], first) or "")
