"""A digest bounds what any key of its block can give a query."""

from __future__ import annotations

import torch

from coattn.ops.reference.digest import digest, score_digest


def test_the_bound_holds_for_every_key_and_is_reached_by_blocks_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 16, generator=generator)
    for block in (1, 8):
        keys = torch.randn(5, 2, block, 16, generator=generator)
        table = torch.tensor([[0, 1, 2], [4, 3, 1]])
        bounds = score_digest(q, digest(keys, "minmax"), table, 1.0)
        products = torch.einsum("shgd,smhbd->shgmb", q.view(2, 2, 3, 16), keys[table])
        assert (bounds >= products.amax(-1) - 1e-4).all()
        assert torch.allclose(bounds, products.amax(-1), atol=1e-4) == (block == 1)


def test_a_mean_is_the_product_with_the_mean_key_whatever_the_slack() -> None:
    q, keys = torch.randn(1, 4, 8), torch.randn(3, 2, 4, 8)
    want = torch.einsum("shgd,mhd->shgm", q.view(1, 2, 2, 8), keys.mean(2))
    for slack in (0.0, 1.0):
        got = score_digest(q, digest(keys, "mean"), torch.tensor([[0, 1, 2]]), slack)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
