"""Chosen entries: weighted_sum against plain torch."""

import pytest
import torch
from tests.native.conftest import forced_isa

from coattn import native
from coattn.kernels.native.weighted_sum import source
from coattn.kernels.quantise.values import LEVELS, ValueBlocks, pack_values

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ELEMENTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16} | dict.fromkeys(LEVELS)


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
    return 4e-6 * max(n, 5) if element in LEVELS else 2e-5


def store(element, seqs, blocks, block, kv_heads, head_size):
    """Random values in random blocks: entries, and what they hold `[seqs, tokens, kv_heads, head_size]`."""
    rows = torch.randn(seqs * blocks, kv_heads, block, head_size)
    if element in LEVELS:
        values = ValueBlocks(pack_values(rows, element), element, block, head_size)
    else:
        values = ValueBlocks.of(rows.to(ELEMENTS[element]))
    table = torch.randperm(len(rows)).int().view(seqs, 1, blocks)
    held = values.read(table[:, 0].long(), torch.float32).transpose(2, 3).flatten(1, 2)
    return (source(values), table), held


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_size", [64, 80, 128, 24])
def test_weighted_sum(kv, isa, element, head_size):
    for group in (1, 3, 8, 11):
        entries, held = store(element, 2, 6, 32, 2, head_size)
        index, count = choose(2, 2, 170, [0, 1, 65, 150])
        weights = torch.rand(2, 2 * group, index.shape[2])
        got = native.plan_weighted_sum(weights, index, count, *entries).run()
        for seq in range(2):
            for h in range(2 * group):
                n, head = int(count[seq, h // group]), h // group
                picked = held[seq, index[seq, head, :n].long(), head]
                exact = weights[seq, h, :n].double() @ picked.double()
                plain = weights[seq, h, :n] @ picked
                kv.assert_close(got[seq, h], plain, exact, floor_of(element, n))


def test_weighted_sum_is_bit_identical():
    entries, _ = store("bf16", 1, 63, 32, 1, 64)
    index, count = choose(1, 1, 2000, [1900])
    call = native.plan_weighted_sum(torch.rand(1, 4, 1900), index, count, *entries)
    first = call.run().clone()
    for _ in range(10):
        assert torch.equal(call.run(), first)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_weighted_sum_property(kv, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    head_size, block, blocks = 8 * draw(st.integers(1, 33)), draw(st.integers(1, 70)), draw(st.integers(1, 9))
    group, n = draw(st.integers(1, 17)), draw(st.integers(0, 200))
    element = draw(st.sampled_from(list(ELEMENTS)))
    entries, held = store(element, 1, blocks, block, 1, head_size)
    index, count = choose(1, 1, blocks * block, [n])
    weights = torch.randn(1, group, index.shape[2])
    with forced_isa(draw(st.sampled_from(kv.usable))):
        got = native.plan_weighted_sum(weights, index, count, *entries).run()
    picked = held[0, index[0, 0, :n].long(), 0]
    exact = weights[0, :, :n].double() @ picked.double()
    kv.assert_close(got[0], weights[0, :, :n] @ picked, exact, floor_of(element, n))


def test_refusals():
    (values, table), _ = store("f32", 1, 2, 32, 1, 64)
    weights, one = torch.ones(1, 1, 1), torch.tensor([[1]], dtype=torch.int32)
    with pytest.raises(native.NativeError, match="Entry 64 is outside"):
        native.plan_weighted_sum(weights, torch.full((1, 1, 1), 64, dtype=torch.int32), one, values, table).run()
    with pytest.raises(native.NativeError, match="claims 2 entries"):
        native.plan_weighted_sum(weights, one[None], one + 1, values, table).run()
    with pytest.raises(native.NativeError, match="is not one of the arena's"):
        native.plan_weighted_sum(weights, one[None], one, values, table + 2).run()
