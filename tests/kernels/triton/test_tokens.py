"""Kernels that write, attend and read tokens in 8 and 4 bits, against their references."""

import pytest
import torch
from tests.kernels.triton.test_kernels import DEVICE, lists, random

from coattn.kernels.append import append, write_rows
from coattn.kernels.attend import reference
from coattn.kernels.flash import rows
from coattn.kernels.quantise.tokens import TokenBlocks, row_bytes
from coattn.state import Split

pytest.importorskip("triton")
from coattn.kernels.triton import append as append_kernel
from coattn.kernels.triton import tokens as kernel

FORMS = ("int8", "int4")
SHAPES = [
    (8, 16, torch.float32),
    (5, 80, torch.float32),
    pytest.param(32, 64, torch.bfloat16, marks=pytest.mark.gpu),  # the interpreter has no bfloat16
]


def filled(form: str, blocks: int, heads: int, block: int, d: int, dtype: torch.dtype = torch.float32) -> TokenBlocks:
    size = (blocks, heads, 2, block * row_bytes(form, d))
    made = TokenBlocks(torch.zeros(size, dtype=torch.uint8, device=DEVICE), form, block, d, dtype)
    places = torch.arange(blocks * block, device=DEVICE)
    k, v = (random(len(places), heads, d, dtype=dtype, seed=i) for i in (1, 2))
    write_rows.reference(made, places // block, places % block, k, v)
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("block", "d", "dtype"), SHAPES)
def test_write(form: str, block: int, d: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([1, 4, 0], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([block - 1, 2, 0], dtype=torch.int32, device=DEVICE)
    k, v = (random(3, 2, d, dtype=dtype, seed=i) for i in (3, 4))
    made = []
    for run in (append_kernel.append, append.reference):
        blocks = filled(form, 5, 2, block, d, dtype)
        run(blocks, ids, places, k, v)
        made.append(blocks)
    found, wanted = made
    torch.testing.assert_close(found.numbers, wanted.numbers, atol=1e-6, rtol=1e-3)
    # a number in the middle between two codes may get either
    codes = [torch.cat([x.codes & 15, x.codes >> 4], -1).int() if form == "int4" else x.codes.int() for x in made]
    differ = (codes[0] - codes[1]).abs()
    assert differ.max() <= 1
    assert (differ > 0).float().mean() < 0.01
    assert not torch.equal(found.memory, filled(form, 5, 2, block, d, dtype).memory)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("group", "kv_heads", "d", "block", "per_head", "softcap"),
    [
        (1, 2, 64, 32, False, None),
        (4, 2, 128, 32, True, None),
        (5, 1, 80, 16, False, None),
        (16, 1, 96, 32, False, 30.0),
        (2, 1, 256, 8, True, None),
    ],
)
def test_attend(
    form: str, group: int, kv_heads: int, d: int, block: int, per_head: bool, softcap: float | None
) -> None:
    blocks = filled(form, 12, kv_heads, block, d)
    longest = min(150, 9 * block)
    picked = lists([longest, 0, 1], kv_heads if per_head else 1, block, 12, 5)
    q = random(3, 1, kv_heads * group, d, dtype=torch.float32, seed=7)
    found = kernel.attend(q, blocks, picked, d**-0.5, softcap)
    assert isinstance(found, Split)
    wanted = reference(q, blocks.read(torch.arange(12, device=DEVICE)), picked, d**-0.5, softcap)
    torch.testing.assert_close(found.merged().out, wanted.out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.merged().lse, wanted.lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16])
def test_attend_in_16_bits_is_as_near_as_attention_over_the_unpacked_blocks(form: str, dtype: torch.dtype) -> None:
    blocks = filled(form, 12, 2, 16, 64, dtype)
    exact = TokenBlocks(blocks.memory, form, 16, 64, torch.float32).read(torch.arange(12, device=DEVICE))
    picked = lists([150, 37], 1, 16, 12, 5)
    q = random(2, 1, 6, 64, dtype=dtype, seed=7)
    wanted = reference(q.float(), exact, picked, 0.3, None)
    plain = reference(q, exact.to(dtype), picked, 0.3, None)
    found = kernel.attend(q, blocks, picked, 0.3, None).merged()
    assert (found.out - wanted.out).abs().max() <= 2 * (plain.out - wanted.out).abs().max() + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("block", "d", "dtype"), SHAPES)
def test_listed_rows(form: str, block: int, d: int, dtype: torch.dtype) -> None:
    blocks = filled(form, 6, 2, block, d, dtype)
    ids = torch.tensor([5, 0, 3], device=DEVICE)
    tokens = 2 * block + 3
    found = kernel.listed_rows(blocks, ids, tokens)
    both = blocks.read(ids).permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens]
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for own, wanted, plain in zip(found, both, rows(blocks, ids, tokens), strict=True):
        torch.testing.assert_close(own, wanted, atol=bound, rtol=bound)
        torch.testing.assert_close(plain, wanted, atol=bound, rtol=bound)
