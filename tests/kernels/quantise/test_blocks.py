"""Blocks in 8 bits: PyTorch's form of them, in the C++ kernels' layout (whose reading tests/native tests)."""

import pytest
import torch

from coattn import native
from coattn.kernels.quantise.blocks import Layout, PackedBlocks, pack_blocks, read_entries, scales_of, unpack_blocks
from coattn.types import LayerShape

SIZES = [(32, 128), (16, 64), (8, 16), (5, 80), (24, 96), (1, 8)]


@pytest.mark.parametrize(("block", "d"), SIZES)
def test_the_layout_is_that_of_the_kernels(block: int, d: int) -> None:
    mine, theirs = Layout(block, d), native.block_layout("int8", block, d)
    assert (theirs.k_stride, theirs.v_stride) == (d, d)
    assert (block * d, mine.scales, mine.bytes) == (theirs.v, theirs.k_scale, theirs.bytes)
    assert theirs.k_min == mine.scales + 2 * d
    assert (theirs.v_scale, theirs.v_min) == (mine.scales + 4 * d, mine.scales + 4 * d + 2 * block)


@pytest.mark.parametrize(("block", "d"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_packed_is_near_what_it_was(block: int, d: int, dtype: torch.dtype) -> None:
    torch.manual_seed(block)
    blocks = (torch.randn(4, 2, 2, block, d) * (1 + 20 * torch.rand(d))).to(dtype)
    back = unpack_blocks(pack_blocks(blocks), block, d, torch.float32)
    # half a step and the rounding of scale and minimum to float16
    wide = blocks.float()
    spread = torch.stack([(x.amax(o, keepdim=True) - x.amin(o, keepdim=True)).expand_as(x)
                          for x, o in ((wide[:, :, 0], -2), (wide[:, :, 1], -1))], 2)  # fmt: skip
    slack = spread * (0.5 / 255 + 1e-3) + wide.abs().amax() * 1e-3
    assert bool(((back - wide).abs() <= slack).all())
    assert (back - wide).norm() < 0.01 * wide.norm()


def test_numbers_that_have_a_code_come_back_as_they_were() -> None:
    blocks = (torch.rand(3, 2, 2, 8, 16) > 0.5).float() * (255 / 256)
    blocks[0, 0, 0, :, 3] = 0.25  # a channel without a spread
    assert torch.equal(unpack_blocks(pack_blocks(blocks), 8, 16, torch.float32), blocks)


def test_single_rows_are_those_of_the_blocks() -> None:
    torch.manual_seed(4)
    blocks = torch.randn(5, 3, 2, 8, 16)
    packed = pack_blocks(blocks)
    whole = unpack_blocks(packed, 8, 16, torch.float32)
    ids, heads, rows = torch.randint(5, (7, 4)), torch.randint(3, (1, 4)), torch.randint(8, (7, 4))
    scales = scales_of(packed, 8, 16).clone()
    packed[..., Layout(8, 16).scales :] = 0
    found = read_entries(PackedBlocks(packed, 8, 16, scales), ids, heads, rows)
    assert torch.equal(found, whole[ids, heads, :, rows])
    assert torch.equal(found, read_entries(whole, ids, heads, rows))


def test_blocks_are_read_as_numbers() -> None:
    shape = LayerShape(40, 8, 128, torch.bfloat16, torch.device("cpu"))
    assert PackedBlocks(torch.zeros(3, 8, 8832, dtype=torch.uint8), 32, 128).read(
        torch.tensor([1]), shape.dtype
    ).shape == (1, 8, 2, 32, 128)
