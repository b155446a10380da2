"""Tokens in 8 and 4 bits: what codes say, where they lie, and attention over them."""

import pytest
import torch

from coattn.cache.ledger import Ledger
from coattn.cache.tokens import TokenMemory
from coattn.errors import ConfigError
from coattn.kernels import attend as op
from coattn.kernels.append import append, write_rows
from coattn.kernels.attend import attend, reference
from coattn.kernels.quantise.tokens import TokenBlocks, pack_rows, row_bytes, turn, unpack_rows
from coattn.types import BlockList, LayerShape

FORMS = ("int8", "int4")
HEADS, BLOCKS = 2, 12


def empty(form: str, block: int, d: int, dtype: torch.dtype = torch.float32) -> TokenBlocks:
    memory = torch.zeros(BLOCKS, HEADS, 2, block * row_bytes(form, d), dtype=torch.uint8)
    return TokenBlocks(memory, form, block, d, dtype)


def filled(form: str, block: int, d: int, dtype: torch.dtype = torch.float32) -> TokenBlocks:
    blocks = empty(form, block, d, dtype)
    places = torch.arange(BLOCKS * block)
    k, v = torch.randn(2, len(places), HEADS, d).to(dtype)
    write_rows(blocks, places // block, places % block, k, v)
    return blocks


@pytest.mark.parametrize("d", [16, 64, 80, 96, 128, 192, 256])
def test_turning_twice_changes_nothing_and_keeps_products(d: int) -> None:
    x, y = torch.randn(2, 5, d)
    torch.testing.assert_close(turn(turn(x)), x)
    torch.testing.assert_close((turn(x) * turn(y)).sum(-1), (x * y).sum(-1))
    assert (turn(x) - x).abs().max() > 0.1


@pytest.mark.parametrize(("form", "levels"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("d", [16, 80, 128])
def test_a_row_is_off_by_half_a_step_at_most(form: str, levels: int, d: int) -> None:
    x = torch.randn(7, 3, d)
    codes, numbers = pack_rows(x, form)
    assert codes.shape[-1] + 2 * numbers.shape[-1] == row_bytes(form, d)
    off = turn(unpack_rows(codes, numbers, form, torch.float32) - x).unflatten(-1, (2, -1))
    halves = turn(x).unflatten(-1, (2, -1))
    step = (halves.amax(-1) - halves.amin(-1)) / levels
    assert (off.abs().amax(-1) <= 0.51 * step + 2e-3 * halves.abs().amax(-1)).all()
    assert off.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_channel_a_hundred_times_the_others_leaves_them_their_steps(form: str) -> None:
    x = torch.randn(50, 128)
    x[:, 7] += 100
    off = (unpack_rows(*pack_rows(x, form), form, torch.float32) - x).square().mean().sqrt()
    alone = 100 / (255 if form == "int8" else 15) / 12**0.5  # of a row with one scale
    assert off < alone / 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("block", "d"), [(32, 64), (5, 80)])
def test_each_token_is_written_where_it_belongs_and_nothing_else_changes(form: str, block: int, d: int) -> None:
    blocks, k, v = filled(form, block, d), torch.randn(3, HEADS, d), torch.randn(3, HEADS, d)
    before = blocks.memory.clone()
    ids, rows = torch.tensor([4, 0, 4], dtype=torch.int32), torch.tensor([1, 4, 0], dtype=torch.int32)
    append(blocks, ids, rows, k, v)
    found = blocks.read(torch.arange(BLOCKS))
    for i, (b, row) in enumerate(zip(ids.tolist(), rows.tolist(), strict=True)):
        for side, x in enumerate((k, v)):
            assert torch.equal(found[b, :, side, row], unpack_rows(*pack_rows(x[i], form), form, torch.float32))
    blocks.write(ids.long(), rows.long(), torch.zeros_like(k), torch.zeros_like(v))
    untouched = TokenBlocks(before, form, block, d, torch.float32)
    untouched.write(ids.long(), rows.long(), torch.zeros_like(k), torch.zeros_like(v))
    assert torch.equal(blocks.memory, untouched.memory)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "lists", "softcap"), [(1, 1, None), (1, HEADS, 3.0), (70, 1, None), (9, HEADS, None)]
)
def test_attention_equals_that_over_the_same_blocks_unpacked(
    form: str, dtype: torch.dtype, queries: int, lists: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "PIECE", 24)  # several pieces
    block, d = 8, 64
    blocks = filled(form, block, d, dtype)
    seqs = 1 if queries == 70 else 3
    tokens = torch.tensor([61, 0, 8], dtype=torch.int32)[:seqs, None].expand(-1, lists).contiguous()
    table = torch.full((seqs, lists, 9), 1 << 30, dtype=torch.int32)
    for i in range(seqs):
        for j in range(lists):
            table[i, j, : -(-int(tokens[i, j]) // block)] = torch.randperm(BLOCKS)[
                : -(-int(tokens[i, j]) // block)
            ].int()
    picked = BlockList(table, tokens, 61)
    q = torch.randn(seqs, queries, 3 * HEADS, d).to(dtype)
    found = attend(q, blocks, picked, 0.2, softcap)
    wanted = reference(q, blocks.read(torch.arange(BLOCKS)), picked, 0.2, softcap)
    bound = 2e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.out.float(), wanted.out, atol=bound, rtol=bound)
    torch.testing.assert_close(found.lse, wanted.lse, atol=bound, rtol=bound)
    if seqs > 1:
        assert found.lse[1].eq(-torch.inf).all()


@pytest.mark.parametrize(("form", "bytes_of_a_row"), [("int8", 136), ("int4", 72)])
def test_memory_holds_the_bytes_that_it_declares(form: str, bytes_of_a_row: int) -> None:
    shape = LayerShape(8, HEADS, 128, torch.bfloat16, torch.device("cpu"))
    ledger = Ledger(gpu=1 << 20)
    memory = TokenMemory("gpu", {0: shape, 1: shape}, 32, ledger, "Keeping every token", form)
    memory.reserve(3)
    assert memory.block_bytes == 2 * 2 * HEADS * 32 * bytes_of_a_row
    assert sum(memory[i].nbytes for i in (0, 1)) == ledger.held["gpu"] == memory.bytes
    k, v = torch.randn(2, 64, HEADS, 128, dtype=torch.bfloat16)
    places = torch.arange(64)
    write_rows(memory.rows(0), places // 32, places % 32, k, v)
    assert torch.equal(memory[0][:2], memory.pack(k, v))


def test_a_head_that_cannot_be_cut_into_four_is_refused() -> None:
    shape = LayerShape(8, HEADS, 18, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="18 channels cannot be cut into four"):
        TokenMemory("gpu", {0: shape}, 32, Ledger(), "Keeping every token", "int4")
