"""Lists that say where their blocks lie, and whose row is whose."""

from __future__ import annotations

import torch

from coattn.kernels.attend import reference
from coattn.kernels.native import attend as native
from coattn.types import BlockList


def test_blocks_of_one_head_each_listed_by_any() -> None:
    """Blocks that repeat over KV heads with a stride of zero, rows of the lists in another order than the sequences."""
    torch.manual_seed(0)
    pool = torch.randn(12, 1, 2, 8, 16)
    blocks = pool.expand(-1, 3, -1, -1, -1)
    q = torch.randn(2, 1, 6, 16)
    table = torch.randint(0, 12, (4, 3, 5), dtype=torch.int32)
    tokens = torch.tensor([[3, 40, 0], [7, 8, 9], [1, 1, 1], [33, 12, 16]], dtype=torch.int32)
    owners = torch.tensor([3, 0], dtype=torch.int32)
    found = native.attend(q, blocks, BlockList(table, tokens, 40, owners=owners), 0.25, None)
    order = owners.long()
    wanted = reference(q, blocks, BlockList(table[order], tokens[order], 40), 0.25, None)
    torch.testing.assert_close(found.out, wanted.out)
    torch.testing.assert_close(found.lse, wanted.lse)
    assert found.lse[1, 0, 4:].eq(-torch.inf).all(), "the last KV head of the second sequence has nothing"
