"""`attend` in C++ against the reference, and what it refuses."""

import pytest
import torch

from coattn.kernels import attend as op
from coattn.kernels.native import attend as native
from coattn.types import BlockList

SEQS, KV_HEADS, BLOCKS = 3, 2, 7


def call(block: int, head_dim: int, dtype: torch.dtype, lists: int, queries: int, group: int = 3):  # type: ignore[no-untyped-def]
    blocks = torch.randn(40, KV_HEADS, 2, block, head_dim).to(dtype)
    q = torch.randn(SEQS, queries, KV_HEADS * group, head_dim).to(dtype)
    tokens = torch.randint(0, BLOCKS * block + 1, (SEQS, lists), dtype=torch.int32)
    tokens[0] = 0
    tokens[1] = block + 1
    table = torch.stack([torch.randperm(40)[:BLOCKS] for _ in range(SEQS * lists)]).int().view(SEQS, lists, BLOCKS)
    return q, blocks, BlockList(table, tokens, int(tokens.max()))


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("lists", [1, KV_HEADS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "head_dim"), [(32, 64), (8, 16), (16, 128)])
def test_equals_the_reference(block: int, head_dim: int, dtype: torch.dtype, lists: int, queries: int) -> None:
    q, blocks, picked = call(block, head_dim, dtype, lists, queries)
    assert native.refuses(q, blocks) is None
    own = op.attend(q, blocks, picked, 0.2, None)
    plain = op.reference(q, blocks, picked, 0.2, None)
    bound = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(own.out, plain.out, atol=bound, rtol=bound)
    torch.testing.assert_close(own.lse, plain.lse, atol=bound, rtol=bound)
    assert torch.equal(own.lse[0], torch.full_like(own.lse[0], -torch.inf))
    assert torch.equal(own.out[0], torch.zeros_like(own.out[0]))


def test_soft_capping_equals_the_reference() -> None:
    q, blocks, picked = call(32, 64, torch.float32, 1, 1)
    own, plain = op.attend(q, blocks, picked, 0.5, 3.0), op.reference(q, blocks, picked, 0.5, 3.0)
    torch.testing.assert_close(own.out, plain.out, atol=2e-6, rtol=2e-6)
    assert not torch.allclose(plain.out, op.reference(q, blocks, picked, 0.5, None).out)


@pytest.mark.parametrize(
    ("block", "head_dim", "dtype", "reason"),
    [(32, 20, torch.float32, "multiple of 8"), (32, 64, torch.float64, "float64"), (5, 24, torch.bfloat16, "packed")],
)
def test_what_it_refuses_goes_to_the_reference(block: int, head_dim: int, dtype: torch.dtype, reason: str) -> None:
    q, blocks, picked = call(block, head_dim, dtype, 1, 1)
    assert reason in (native.refuses(q, blocks) or "")
    assert torch.equal(op.attend(q, blocks, picked, 0.2, None).out, op.reference(q, blocks, picked, 0.2, None).out)


def test_a_strided_list_is_fine() -> None:
    q, blocks, picked = call(32, 64, torch.float32, 1, 1)
    wide = picked.table.repeat_interleave(2, 2)[:, :, ::2]
    strided = BlockList(wide, picked.tokens, picked.longest)
    assert not wide.is_contiguous()
    assert torch.equal(op.attend(q, blocks, strided, 0.2, None).out, op.attend(q, blocks, picked, 0.2, None).out)


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
    wanted = op.reference(q, blocks, BlockList(table[order], tokens[order], 40), 0.25, None)
    torch.testing.assert_close(found.out, wanted.out)
    torch.testing.assert_close(found.lse, wanted.lse)
    assert found.lse[1, 0, 4:].eq(-torch.inf).all(), "the last KV head of the second sequence has nothing"
