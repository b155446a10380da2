"""A digest bounds what any key of its block can give a query."""

import torch

from coattn.kernels.digest import digest, score_digest


def test_the_bound_holds_for_every_key_and_is_reached_by_blocks_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 16, generator=generator)
    for block in (1, 8):
        keys = torch.randn(5, 2, block, 16, generator=generator)
        table = torch.tensor([[0, 1, 2], [4, 3, 1]])
        bounds = score_digest(q, digest(keys), table, 1.0)
        products = torch.einsum("shgd,smhbd->shgmb", q.view(2, 2, 3, 16), keys[table])
        assert (bounds >= products.amax(-1) - 1e-4).all()
        assert torch.allclose(bounds, products.amax(-1), atol=1e-4) == (block == 1)
