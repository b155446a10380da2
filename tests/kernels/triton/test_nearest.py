"""Nearest centroids, and full blocks that become codes and values inside a recorded step: kernels against PyTorch."""

from dataclasses import replace

import pytest
import torch

from coattn.kernels.quantise import grid
from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.pack import pack
from coattn.kernels.quantise.values import LEVELS, block_bytes, pack_values, unpack_values

pytest.importorskip("triton")
from coattn.kernels.triton import flush as flushing
from coattn.kernels.triton import nearest as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpu_and_book(block: int, groups: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, Codebook]:
    gpu = torch.randn(5, 2, 2, block, groups * width).to(DEVICE, dtype)
    return gpu, Codebook(torch.randn(1, 200, width).to(DEVICE, dtype), groups)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_nearest(width: int) -> None:
    groups = 4
    book = Codebook(torch.randn(1, 300, width).to(DEVICE), groups)
    keys = torch.randn(45, groups * width).to(DEVICE)
    got = kernel.nearest(keys, book.centroids)
    pieces = keys.view(-1, groups, 1, width) - book.centroids.expand(groups, -1, -1)
    distance = pieces.square().sum(-1)
    taken = distance.gather(-1, got.long()[..., None])[..., 0]
    torch.testing.assert_close(taken, distance.amin(-1), atol=1e-5, rtol=1e-5)


def cell_of(cells: grid.Grid, points: torch.Tensor) -> torch.Tensor:
    """points `[n, width]` -> the number of each one's cell."""
    along, number = cells.cells, torch.zeros(len(points), dtype=torch.long, device=points.device)
    outside = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for x, edges in zip(points.T.contiguous(), cells.edges, strict=True):
        number = number * along + (torch.searchsorted(edges, x, right=True) - 1).clamp(0, along - 1)
        outside |= ~((x >= edges[0]) & (x <= edges[-1]))
    return torch.where(outside, along ** len(cells.edges), number)


@pytest.mark.parametrize("width", [1, 2])
def test_nearest_by_a_grid_is_the_nearest_of_all(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and sparse places, and points far beyond every centroid."""
    monkeypatch.setitem(grid.EDGES, width, 32)
    spread = torch.exp(torch.randn(400, 1))
    book = Codebook((torch.randn(1, 400, width) * spread).to(DEVICE), 4)
    keys = torch.randn(70, 4 * width) * torch.exp(torch.randn(70, 1))
    keys[3] *= 1000
    keys = keys.to(DEVICE)
    got = kernel.nearest(keys, book.centroids, book.grid)
    assert torch.equal(got, kernel.nearest(keys, book.centroids))
    cell = cell_of(book.grid, keys.view(-1, width))
    count = (book.grid.start[cell + 1] - book.grid.start[cell]).float()
    assert count.median() < 100, "most points are compared with few of 400"
    assert count.max() == 400, "some with all"


@pytest.mark.slow
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("bits", [12, 13, 16])
def test_full_blocks_become_codes_and_others_stay(bits: int, turned: bool) -> None:
    gpu, book = gpu_and_book(16, 8, 2, torch.float32)
    if turned:
        # whole numbers: sums of products are exact in any order
        gpu = gpu.mul(8).round()
        axes = torch.randint(-3, 4, (2, 16, 16)).float() + 40 * torch.eye(16)
        book = replace(book, basis=Basis.of(axes, torch.float32, DEVICE))
    width = 8 if bits == 16 else bits
    kept = torch.full((7, 2, 16, width), 99, dtype=torch.int16 if bits == 16 else torch.uint8, device=DEVICE)
    ids = torch.tensor([3, 1, 4], dtype=torch.int32, device=DEVICE)
    flush_to = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE)
    kernel.code_flushed(gpu, kept, ids, flush_to, book, bits)
    want = torch.full_like(kept, 99)
    for i in (0, 2):
        keys = gpu[int(ids[i]), :, 0]
        if book.basis is not None:
            keys = book.basis.keys(keys.transpose(0, 1)).transpose(0, 1)
        codes = kernel.nearest(keys.reshape(-1, keys.shape[-1]), book.centroids).view(2, 16, 8)
        want[int(flush_to[i])] = codes if bits == 16 else pack(codes, bits)
    assert torch.equal(kept, want)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_values_are_packed_within_half_a_step(form: str) -> None:
    values = torch.randn(3, 2, 16, 32)
    packed = pack_values(values, form)
    assert packed.shape == (3, 2, block_bytes(form, 16, 32))
    back = unpack_values(packed, form, 16, 32, torch.float32)
    spread = values.amax(-1) - values.amin(-1)
    assert ((back - values).abs().amax(-1) <= spread / LEVELS[form] * 0.51 + 4e-3).all()


@pytest.mark.parametrize("form", ["model", "int8", "int4"])
def test_full_blocks_leave_their_values(form: str) -> None:
    gpu, _ = gpu_and_book(16, 8, 4, torch.bfloat16)
    ids = torch.tensor([3, 1, 4], dtype=torch.int32, device=DEVICE)
    flush_to = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE)
    if form == "model":
        host = torch.full((7, 2, 16, 32), 9.0, dtype=gpu.dtype, device=DEVICE)
        flushing.flush_rows(gpu, host, host, ids, flush_to, 0)
    else:
        host = torch.full((7, 2, block_bytes(form, 16, 32)), 0, dtype=torch.uint8, device=DEVICE)
        flushing.flush_rows(gpu, host, host.view(torch.float16), ids, flush_to, LEVELS[form])
    want = torch.full_like(host, 9 if form == "model" else 0)
    for i in (0, 2):
        values = gpu[int(ids[i]), :, 1][None]
        want[int(flush_to[i])] = values[0] if form == "model" else pack_values(values, form)[0]
    if form == "model":
        assert torch.equal(host, want)
    else:  # a code may fall to the other side of a half by a last bit
        assert ((host.int() - want.int()).abs() > 0).float().mean() < 0.01
        back, exact = (unpack_values(x, form, 16, 32, torch.float32) for x in (host[[5, 2]], want[[5, 2]]))
        torch.testing.assert_close(back, exact, atol=0.3 if form == "int4" else 0.05, rtol=0.05)


def test_full_blocks_are_added_to_the_sums_of_their_sequences() -> None:
    gpu, _ = gpu_and_book(16, 8, 4, torch.bfloat16)
    ids, flush_to, seq = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([3, 1, 4], [5, -1, 2], [2, 0, 1]))
    sums = torch.randn(4, 2, 33, device=DEVICE)
    want = sums.clone()
    for i in (0, 2):
        want[int(seq[i]), :, :-1] += gpu[int(ids[i]), :, 1].float().sum(1)
        want[int(seq[i]), :, -1] += 16
    flushing.sum_values(gpu, sums, ids, flush_to, seq)
    torch.testing.assert_close(sums, want, atol=1e-4, rtol=1e-4)


def test_sums_become_means_of_every_query_head() -> None:
    sums = torch.randn(4, 2, 33, device=DEVICE)
    sums[:, :, -1] = torch.tensor([64.0, 0.0, 16.0, 0.0], device=DEVICE)[:, None]
    seq = torch.tensor([2, 1, 3], dtype=torch.int32, device=DEVICE)
    got = flushing.mean_values(sums, seq, 3)
    want = (sums[..., :-1] / sums[..., -1:].clamp_min(1))[[2, 1, 3]].repeat_interleave(3, 1)
    torch.testing.assert_close(got, want)


def test_full_blocks_leave_their_keys() -> None:
    gpu, _ = gpu_and_book(8, 4, 3, torch.float32)
    kept = torch.zeros(4, 2, 8, 12, device=DEVICE)
    ids, flush_to = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([2, 0], [1, -1]))
    flushing.flush_rows(gpu, kept, kept, ids, flush_to, 0, kind=0)
    assert torch.equal(kept[1], gpu[2, :, 0])
    assert not kept[[0, 2, 3]].any()
