"""Keys in a basis: scores stay what they are, and codes lose less of them."""

import torch

from coattn.kernels.quantise.basis import Basis, deal, fit_basis
from coattn.kernels.quantise.codebook import Codebook, fit


def uneven(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[n, 2, 16]` and queries `[n, 4, 16]` whose directions differ much in size, and are not the channels."""
    draws = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(7))).Q
    sizes = torch.logspace(1, -1, 16)
    keys = torch.randn(6000, 2, 16, generator=draws) * sizes @ turn
    return keys, torch.randn(6000, 4, 16, generator=draws) * sizes.flip(0).sqrt() @ turn


def fitted(groups: int) -> Basis:
    keys, q = uneven(0)
    moment = torch.einsum("thxd,thxe->hde", *[q.view(-1, 2, 2, 16)] * 2) / (2 * len(q))
    return fit_basis(keys, moment, groups)


def test_scores_are_what_they_were_and_rounded_axes_still_have_their_inverse() -> None:
    keys, q = (x[:50] for x in uneven(1))
    want = torch.einsum("shxd,shd->shx", q.view(50, 2, 2, 16), keys)
    exact = fitted(4)
    exact_scores, rounded_scores = (
        torch.einsum("shxd,shd->shx", basis.queries(q).view(50, 2, 2, 16), basis.keys(keys))
        for basis in (exact, Basis.of(exact.to, torch.bfloat16, torch.device("cpu")))
    )
    torch.testing.assert_close(exact_scores, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(exact.undo(exact.keys(keys)), keys, atol=1e-4, rtol=1e-4)
    assert (rounded_scores - want).square().mean() < 1e-4 * want.square().mean()


def test_codes_in_a_basis_lose_less_of_the_scores() -> None:
    basis, groups = fitted(4), 4
    keys, _ = uneven(0)
    books = [fit(keys.flatten(0, 1), groups, 256), fit(basis.keys(keys).flatten(0, 1), groups, 256)]
    books[1] = Codebook(books[1].centroids, groups, basis=basis)
    fresh, q = uneven(2)
    lost = []
    for book in books:
        error = book.decode(book.encode(fresh)) - fresh
        lost.append(float(torch.einsum("thxd,thd->thx", q.view(-1, 2, 2, 16), error).square().mean()))
    assert lost[1] < lost[0] / 2


def test_axes_are_dealt_out_so_that_products_are_alike() -> None:
    spread = torch.logspace(3, -3, 12)[torch.randperm(12)]
    order = deal(spread, 4)
    assert sorted(order.tolist()) == list(range(12))
    products = spread[order].view(4, 3).log().sum(1)
    apart = spread.sort().values.view(4, 3).log().sum(1)
    assert float(products.max() - products.min()) < float(apart.max() - apart.min()) / 4
