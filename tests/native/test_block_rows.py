"""Rows into blocks and back: exact for float elements, within the documented bound for int8 and int4."""

import pytest
import torch

from coattn import native

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def store(element, block, kv_heads, head_size, n):
    layout = native.block_layout(element, block, head_size)
    memory = torch.zeros(n, kv_heads * layout.bytes, dtype=torch.uint8)
    return native.Blocks(memory, element, block, kv_heads, head_size)


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS.values())
def test_write_rows_and_read_back(isa, element, dtype):
    blocks = store(element, 16, 3, 80, 5)
    k, v = torch.randn(2, 30, 3, 80).mul(3).to(dtype)
    k[0, 0, :6] = torch.tensor([0.0, -0.0, 1e-30, float("inf"), -float("inf"), float("nan")]).to(dtype)
    slots = torch.randperm(80)[:30].contiguous()
    native.write_rows(k, v, slots, blocks)
    got_k, got_v = native.read_blocks(torch.arange(5, dtype=torch.int32), 80, blocks)
    for got, rows in ((got_k, k), (got_v, v)):
        expected = rows.to(FLOATS[element]).float()
        torch.testing.assert_close(got[slots], expected, rtol=0, atol=0, equal_nan=True)
    untouched = [s for s in range(80) if s not in slots.tolist()]
    assert (got_k[untouched] == 0).all()


@pytest.mark.parametrize("element", FLOATS)
def test_block_memory_is_key_rows_then_value_rows(isa, element):
    """The layout other readers (a pulling GPU) rely on."""
    blocks = store(element, 8, 2, 64, 3)
    k, v = torch.randn(2, 16, 2, 64).to(FLOATS[element])
    native.write_blocks(k, v, torch.tensor([2, 0], dtype=torch.int32), blocks)
    view = blocks.memory.view(FLOATS[element]).view(3, 2, 2, 8, 64)  # block, head, key or value, row, channel
    assert torch.equal(view[2, :, 0], k[:8].transpose(0, 1))
    assert torch.equal(view[0, :, 1], v[8:].transpose(0, 1))


@pytest.mark.parametrize(("element", "levels"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_quantised_error_is_half_a_step(isa, element, levels, head_size):
    """Keys: half a step of their channel's range over the block; values: of their token's group."""
    block = 32
    blocks = store(element, block, 2, head_size, 3)
    k, v = torch.randn(2, 3 * block - 5, 2, head_size)
    k = k + 5 * (torch.arange(head_size) % 16 == 3)
    k[:, 0, 1] = 0.25  # a constant channel is exact
    native.write_blocks(k, v, torch.tensor([1, 2, 0], dtype=torch.int32), blocks)
    got_k, got_v = native.read_blocks(torch.tensor([1, 2, 0], dtype=torch.int32), len(k), blocks)
    assert torch.equal(got_k[:, 0, 1], k[:, 0, 1])
    for first in range(0, len(k), block):
        rows = slice(first, min(first + block, len(k)))
        spread = k[rows].amax(0) - k[rows].amin(0)
        # scale and minimum are float16: the minimum may lie 2^-10 of its size lower, the step be 2^-10 larger
        slack = k[rows].abs().amax(0) * 2**-9 / levels + 1e-6
        assert ((got_k[rows] - k[rows]).abs() <= spread * (1 + 2**-9) / levels / 2 + slack).all()
    groups = 1 if element == "int8" else 2
    parts = v.view(*v.shape[:2], groups, -1)
    spread = parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)
    slack = parts.abs().amax(-1, keepdim=True) * 2**-9 / levels + 1e-6
    assert ((got_v.view_as(parts) - parts).abs() <= spread * (1 + 2**-9) / levels / 2 + slack).all()


@pytest.mark.parametrize("element", ["int8", "int4"])
def test_codes_are_where_the_layout_says(element):
    blocks = store(element, 32, 1, 64, 1)
    k, v = torch.randn(2, 32, 1, 64)
    native.write_blocks(k, v, torch.zeros(1, dtype=torch.int32), blocks)
    got_k, got_v = native.read_blocks(torch.zeros(1, dtype=torch.int32), 32, blocks)
    layout, memory = blocks.layout, blocks.memory[0]

    def codes(at):
        raw = memory[at : at + 32 * layout.row_bytes].view(32, layout.row_bytes)
        return raw if element == "int8" else torch.cat([raw & 15, raw >> 4], 1)

    def halves(at, n):
        return memory[at : at + 2 * n].view(torch.float16).float()

    by_hand = halves(layout.k_min, 64) + halves(layout.k_scale, 64) * codes(layout.k)
    torch.testing.assert_close(by_hand, got_k[:, 0], rtol=0, atol=1e-6)
    g = layout.v_groups
    scale = halves(layout.v_scale, 32 * g).view(g, 32).T.repeat_interleave(64 // g, 1)
    low = halves(layout.v_min, 32 * g).view(g, 32).T.repeat_interleave(64 // g, 1)
    torch.testing.assert_close(low + scale * codes(layout.v), got_v[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("element", ["int8", "int4"])
def test_instruction_sets_write_the_same_codes(kv, element):
    k, v = torch.randn(2, 40, 2, 72)
    memories = []
    for name in kv.usable:
        blocks = store(element, 32, 2, 72, 2)
        with native.forced_isa(name):
            native.write_blocks(k, v, torch.arange(2, dtype=torch.int32), blocks)
        memories.append(blocks.memory)
    assert all(torch.equal(memories[0], m) for m in memories)


def test_a_partly_filled_block_keeps_its_other_rows():
    blocks = store("bf16", 32, 1, 64, 1)
    ids = torch.zeros(1, dtype=torch.int32)
    native.write_blocks(torch.ones(32, 1, 64), torch.ones(32, 1, 64), ids, blocks)
    native.write_blocks(torch.zeros(5, 1, 64), torch.zeros(5, 1, 64), ids, blocks)
    k, v = native.read_blocks(ids, 32, blocks)
    assert (k[:5] == 0).all()
    assert (k[5:] == 1).all()
    assert (v[5:] == 1).all()


def test_refusals():
    blocks = store("int8", 32, 1, 64, 2)
    rows = torch.zeros(40, 1, 64)
    with pytest.raises(native.NativeError, match="Single rows cannot be written into int8"):
        native.write_rows(rows, rows, torch.arange(40), blocks)
    with pytest.raises(native.NativeError, match="do not fill 1 blocks"):
        native.write_blocks(rows, rows, torch.zeros(1, dtype=torch.int32), blocks)
    with pytest.raises(native.NativeError, match="Block 2 is not one of"):
        native.write_blocks(rows, rows, torch.tensor([0, 2], dtype=torch.int32), blocks)
    with pytest.raises(native.NativeError, match="do not take"):
        native.write_blocks(rows.double(), rows.double(), torch.tensor([0, 1], dtype=torch.int32), blocks)
    with pytest.raises(native.NativeError, match="too small"):
        native.Blocks(torch.zeros(2, 64, dtype=torch.uint8), "bf16", 32, 1, 64)
