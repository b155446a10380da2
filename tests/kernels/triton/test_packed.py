"""Kernels that write and read blocks in 8 bits, against their references."""

import pytest
import torch

from coattn.kernels.append import append
from coattn.kernels.quantise.blocks import Layout, PackedBlocks, pack_blocks, scales_of, unpack_blocks
from coattn.kernels.recall import recall

pytest.importorskip("triton")
from coattn.kernels.triton import append as append_kernel
from coattn.kernels.triton import recall as recall_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 2


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("block", "d"), [(8, 16), (4, 24), (32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_append(block: int, d: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([1, 4, 0], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([block - 1, 2, block - 1], dtype=torch.int32, device=DEVICE)
    flush_to = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    k, v = (draw(3, HEADS, d, dtype=dtype, seed=i) for i in (1, 2))
    made = []
    for run in (append_kernel.append, append.reference):
        gpu = draw(5, HEADS, 2, block, d, dtype=dtype)
        host = torch.zeros(5, HEADS, Layout(block, d).bytes, dtype=torch.uint8, device=DEVICE)
        near = torch.zeros(5, HEADS, 2 * (d + block), dtype=torch.float16, device=DEVICE)
        run(gpu, ids, places, k, v, PackedBlocks(host, block, d, near), flush_to)
        made.append((gpu, host))
        assert torch.equal(near, scales_of(host, block, d))
    (gpu, host), want = made
    assert torch.equal(gpu, want[0])
    # a number in the middle between two codes may get either
    differ = (host.int() - want[1].int()).abs()[..., : 2 * block * d]
    assert differ.max() <= 1
    assert (differ > 0).float().mean() < 0.01
    scales = Layout(block, d).scales
    assert torch.equal(host[..., scales:], want[1][..., scales:])
    assert host[3].any()
    assert not host[[1, 2, 4]].any()
    back = unpack_blocks(host[:1], block, d, torch.float32)
    torch.testing.assert_close(back, gpu[:1].float(), atol=0.02, rtol=0.01)


@pytest.mark.parametrize(("block", "d"), [(8, 16), (5, 24), (32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recall(block: int, d: int, dtype: torch.dtype) -> None:
    host = PackedBlocks(pack_blocks(draw(6, HEADS, 2, block, d)), block, d)
    to = torch.tensor([[[1, -1, 3], [0, 2, -1]]], dtype=torch.int32, device=DEVICE)
    source = torch.tensor([[[5, 0, 2], [1, 1, 0]]], dtype=torch.int32, device=DEVICE)
    made = []
    for run in (recall_kernel.recall, recall.reference):
        gpu = torch.zeros(4, HEADS, 2, block, d, dtype=dtype, device=DEVICE)
        run(gpu, host, to, source)
        made.append(gpu)
    torch.testing.assert_close(*made)
    assert made[0][1, 0].any()
    assert not made[0][1, 1].any()
