"""Product quantisation: nearest centroids, clustering, codes and back, scores both ways, packing."""

import pytest
import torch

from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.codebook import Codebook, book_bytes, fit
from coattn.kernels.quantise.kmeans import Nearest, kmeans, nearest
from coattn.kernels.quantise.pack import pack, packed_bytes, unpack
from coattn.kernels.score_pq import score_pq
from coattn.types import LayerShape

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st


def distance(points: torch.Tensor, centroids: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    return (points.double() - centroids[owner].double()).norm(dim=1)


@pytest.mark.parametrize("width", [1, 2, 4, 16])
def test_the_nearest_centroid_is_the_nearest(width: int) -> None:
    points, centroids = torch.randn(300, width), torch.randn(70, width)
    exact = torch.cdist(points.double(), centroids.double()).min(1).values
    for owner in (Nearest(centroids)(points), nearest(points, centroids)):
        torch.testing.assert_close(distance(points, centroids, owner), exact, atol=1e-6, rtol=1e-6)


def test_no_points_have_no_nearest() -> None:
    assert nearest(torch.empty(0, 2), torch.randn(4, 2)).shape == (0,)


def test_clusters_are_found() -> None:
    middles = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = (middles[:, None] + 0.1 * torch.randn(4, 500, 2)).flatten(0, 1)
    found = kmeans(points, 4, iterations=30, seed=3)
    # each middle has a centroid, whichever points the clustering started from
    assert torch.cdist(middles, found).min(1).values.max() < 0.05


def test_clustering_beats_its_start_and_repeats_itself() -> None:
    points = torch.randn(4000, 2)
    start = torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:64]
    found = kmeans(points, 64)
    assert torch.equal(found, kmeans(points, 64))

    def error(centroids: torch.Tensor) -> float:
        return float(torch.cdist(points, centroids).min(1).values.square().mean())

    assert error(found) < 0.85 * error(points[start])


def test_fewer_points_than_centroids_lose_nothing() -> None:
    keys = torch.randn(9, 8)
    book = fit(keys, groups=4, count=50)
    torch.testing.assert_close(book.decode(book.encode(keys)), keys)


def test_codes_name_the_nearest_centroid_of_each_piece() -> None:
    keys = torch.randn(6, 5, 12)
    book = fit(torch.randn(400, 12), groups=3, count=20)
    assert book.centroids.shape == (1, 20, 4)
    codes = book.encode(keys)
    assert codes.dtype == torch.int16
    assert codes.shape == (6, 5, 3)
    decoded = book.decode(codes)
    for g in range(3):
        piece, centroids = keys[..., 4 * g : 4 * g + 4], book.centroids[0]
        owner = torch.cdist(piece.flatten(0, 1), centroids).argmin(1)
        torch.testing.assert_close(decoded[..., 4 * g : 4 * g + 4].flatten(0, 1), centroids[owner])


def test_scores_are_products_with_decoded_keys() -> None:
    book = fit(torch.randn(500, 16), groups=4, count=30)
    codes = torch.randint(0, 30, (2, 3, 41, 4)).short()  # a block of each sequence
    q, whole = torch.randn(2, 15, 16), torch.tensor([41, 41])
    exact = torch.einsum("shxd,shnd->shxn", q.view(2, 3, 5, 16).double(), book.decode(codes).double())
    scores = score_pq(q, codes, torch.tensor([[0], [1]]), whole, book, 16, 1.0, None)
    torch.testing.assert_close(scores.double(), exact, atol=1e-5, rtol=1e-5)


def test_more_centroids_lose_less() -> None:
    keys = torch.randn(3000, 16)
    lost = [float((b.decode(b.encode(keys)) - keys).square().mean()) for b in (fit(keys, 8, c) for c in (16, 64, 256))]
    assert lost[0] > 2 * lost[1] > 4 * lost[2]


@settings(max_examples=40, deadline=None)
@given(groups=st.integers(1, 40), bits=st.sampled_from([12, 13, 16]), seed=st.integers(0, 1000))
def test_packed_codes_come_back(groups: int, bits: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << min(bits, 15), (3, 2, groups), generator=draws).short()
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, packed_bytes(groups, bits))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, groups, bits), codes)


def test_packed_codes_lie_one_after_another() -> None:
    packed = pack(torch.tensor([[0xABC, 0x123]], dtype=torch.int16), 12)
    assert packed.tolist() == [[0xBC, 0x3A, 0x12]]


def test_bytes_of_a_codebook() -> None:
    book = Codebook(torch.zeros(1, 256, 4, dtype=torch.bfloat16), 32)
    shape = LayerShape(8, 2, 128, torch.bfloat16, torch.device("cpu"))
    assert book_bytes(shape, 32, 256, False) == book.centroids.nbytes
    basis = Basis.of(torch.eye(128).repeat(2, 1, 1), torch.bfloat16, shape.device)
    turned = book.centroids.nbytes + basis.to.nbytes + basis.back.nbytes
    assert book_bytes(shape, 32, 256, True) == turned
