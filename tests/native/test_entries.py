"""Chosen entries and digests: weighted_sum, compact, score_digest against plain torch."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coattn import native

ELEMENTS = ["f32", "bf16", "f16", "int8", "int4"]


def choose(seqs, kv_heads, tokens, counts):
    """Positions without order, some twice."""
    index = torch.full((seqs, kv_heads, max(max(counts), 1)), -7, dtype=torch.int32)
    count = torch.tensor(counts, dtype=torch.int32).view(seqs, kv_heads)
    for seq in range(seqs):
        for head in range(kv_heads):
            n = int(count[seq, head])
            index[seq, head, :n] = torch.randint(0, tokens, (n,))
    return index, count


def floor_of(element, n):
    # codes count from the group's minimum, so their sum is larger than the result by n times half the range
    return 4e-6 * max(n, 5) if element.startswith("int") else 2e-5


def stored_rows(blocks, table, seq, tokens):
    return native.read_blocks(table[seq, 0, : -(-tokens // blocks.block)].contiguous(), tokens, blocks)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_size", [64, 80, 128, 24])
def test_weighted_sum(kv, isa, element, head_size):
    for group in (1, 3, 8, 11):
        rows = [tuple(torch.randn(2, 170, 2, head_size)) for _ in range(2)]
        blocks, table, _ = kv.fill(rows, element, 32)
        index, count = choose(2, 2, 170, [0, 1, 65, 150])
        weights = torch.rand(2, 2 * group, index.shape[2])
        got = native.weighted_sum(weights, index, count, native.Entries(blocks, table))
        for seq in range(2):
            _, v = stored_rows(blocks, table, seq, 170)
            for h in range(2 * group):
                n, head = int(count[seq, h // group]), h // group
                picked = v[index[seq, head, :n].long(), head]
                exact = weights[seq, h, :n].double() @ picked.double()
                plain = weights[seq, h, :n] @ picked
                kv.assert_close(got[seq, h], plain, exact, floor_of(element, n))


def test_weighted_sum_over_rows(kv, isa):
    k, v = torch.randn(2, 1, 2, 50, 64).bfloat16()
    index, count = choose(1, 2, 50, [20, 49])
    weights = torch.randn(1, 6, index.shape[2])
    got = native.weighted_sum(weights, index, count, native.Entries(k=k, v=v))
    for h in range(6):
        n = int(count[0, h // 3])
        exact = weights[0, h, :n].double() @ v[0, h // 3, index[0, h // 3, :n].long()].double()
        torch.testing.assert_close(got[0, h].double(), exact, atol=1e-5, rtol=0)


def test_weighted_sum_is_bit_identical(kv):
    rows = [tuple(torch.randn(2, 2000, 1, 64))]
    blocks, table, _ = kv.fill(rows, "bf16", 32)
    index, count = choose(1, 1, 2000, [1900])
    call = native.plan_weighted_sum(torch.rand(1, 4, 1900), index, count, native.Entries(blocks, table))
    first = call.run().clone()
    for _ in range(10):
        assert torch.equal(call.run(), first)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compact(kv, isa, element, out_dtype):
    rows = [tuple(torch.randn(2, 90, 2, 80)) for _ in range(2)]
    blocks, table, _ = kv.fill(rows, element, 32)
    index, count = choose(2, 2, 90, [0, 33, 90, 5])
    out = torch.full((2, 2, 2, index.shape[2], 80), 7.0).to(out_dtype)
    native.compact(index, count, native.Entries(blocks, table), out[0], out[1])
    for seq in range(2):
        for side, stored in enumerate(stored_rows(blocks, table, seq, 90)):
            for head in range(2):
                n = int(count[seq, head])
                expected = stored[index[seq, head, :n].long(), head].to(out_dtype)
                assert torch.equal(out[side, seq, head, :n], expected)
                assert (out[side, seq, head, n:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_score_digest(kv, isa, dtype, head_size):
    for group, table_heads in ((1, 1), (4, 2), (5, 1), (8, 2)):
        low, high = torch.randn(2, 150, 2, head_size).sort(0).values
        digest = torch.stack([low, high], 2).to(dtype)
        table = torch.stack([torch.randperm(150) for _ in range(2 * table_heads)]).view(2, table_heads, 150).int()
        count = torch.tensor([[150, 3], [0, 65]], dtype=torch.int32)[:, :table_heads].contiguous()
        q = torch.randn(2, 2 * group, head_size).to(dtype)
        got = native.score_digest(q, digest, table.contiguous(), count, scale=0.5)
        mean = native.score_digest(q, digest[:, :, 1].contiguous(), table.contiguous(), count)
        for seq in range(2):
            for h in range(2 * group):
                head, row = h // group, min(h // group, table_heads - 1)
                n = int(count[seq, row])
                picked = digest[table[seq, row, :n].long(), head].double()
                qd = q[seq, h].double()
                exact = torch.maximum(qd * picked[:, 0], qd * picked[:, 1]).sum(-1) * 0.5
                torch.testing.assert_close(got[seq, h, :n].double(), exact, atol=1e-4, rtol=1e-5)
                torch.testing.assert_close(mean[seq, h, :n].double(), picked[:, 1] @ qd, atol=1e-4, rtol=1e-5)
                assert (got[seq, h, n:] == -math.inf).all()


def test_digest_bounds_every_score(kv, isa):
    """The two-sided digest of a block is an upper bound on its keys' scores."""
    keys = torch.randn(20, 32, 2, 64)
    digest = torch.stack([keys.amin(1), keys.amax(1)], 2)
    q = torch.randn(1, 4, 64)
    table = torch.arange(20, dtype=torch.int32).view(1, 1, 20)
    got = native.score_digest(q, digest, table, torch.tensor([[20]], dtype=torch.int32))
    best = torch.einsum("hd,bthd->hbt", q[0], keys.repeat_interleave(2, 2)).amax(-1)
    assert (got[0] >= best - 1e-4).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_weighted_sum_property(kv, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    head_size, block, tokens = 8 * draw(st.integers(1, 33)), draw(st.integers(1, 70)), draw(st.integers(1, 300))
    group, n = draw(st.integers(1, 17)), draw(st.integers(0, 200))
    element = draw(st.sampled_from(ELEMENTS))
    blocks, table, _ = kv.fill([tuple(torch.randn(2, tokens, 1, head_size))], element, block)
    index, count = choose(1, 1, tokens, [n])
    weights = torch.randn(1, group, index.shape[2])
    with native.forced_isa(draw(st.sampled_from(kv.usable))):
        got = native.weighted_sum(weights, index, count, native.Entries(blocks, table))
    _, v = stored_rows(blocks, table, 0, tokens)
    picked = v[index[0, 0, :n].long(), 0]
    exact = weights[0, :, :n].double() @ picked.double()
    kv.assert_close(got[0], weights[0, :, :n] @ picked, exact, floor_of(element, n))


def test_refusals(kv):
    blocks, table, _ = kv.fill([tuple(torch.randn(2, 40, 1, 64))], "f32", 32)
    entries = native.Entries(blocks, table)
    one = torch.tensor([[1]], dtype=torch.int32)
    with pytest.raises(native.NativeError, match="Entry 64 is outside"):
        native.weighted_sum(torch.ones(1, 1, 1), torch.full((1, 1, 1), 64, dtype=torch.int32), one, entries)
    with pytest.raises(native.NativeError, match="claims 2 entries"):
        native.weighted_sum(torch.ones(1, 1, 1), one[None], one + 1, entries)
    with pytest.raises(native.NativeError, match="neither blocks nor rows"):
        native.weighted_sum(torch.ones(1, 1, 1), one[None], one, native.Entries())
    with pytest.raises(native.NativeError, match="has no digest"):
        native.score_digest(
            torch.ones(1, 1, 64), torch.ones(3, 1, 64), torch.full((1, 1, 1), 3, dtype=torch.int32), one
        )
