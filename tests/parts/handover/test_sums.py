"""A mailbox whose jobs add up values: lists that change from step to step, answered by the C++ server."""

import time

import pytest
import torch

from coattn import native
from coattn.kernels.native.weighted_sum import source
from coattn.kernels.quantise.values import ValueBlocks, pack_values, unpack_values
from coattn.kernels.weighted_sum import reference as weighted_sum
from coattn.native.core import extension


@pytest.mark.parametrize("form", ["model", "int8", "int4"])
def test_lists_are_read_anew_at_every_step(form: str) -> None:
    batch, kv_heads, group, most, d = 3, 2, 4, 40, 64
    plain = torch.randn(12, kv_heads, 8, d)
    memory = plain if form == "model" else pack_values(plain, form)
    values = ValueBlocks(memory, form, 8, d)
    if form != "model":
        plain = unpack_values(memory, form, 8, d, torch.float32)
    table = torch.randperm(12)[:12].int().view(batch, 1, 4)
    index = torch.zeros(batch, kv_heads, most, dtype=torch.int32)
    count = torch.zeros(batch, kv_heads, dtype=torch.int32)
    weights, out = torch.zeros(batch, kv_heads * group, most), torch.zeros(batch, kv_heads * group, d)
    words = torch.zeros(32, dtype=torch.int32)
    post, reply = words[:1], words[16:17]
    server = extension.Mailbox(2_000_000)
    plan = native.plan_weighted_sum(weights, index, count, source(values), table, into=out)
    server.add(plan.job, post.data_ptr(), reply.data_ptr(), 0)
    for step, seqs in enumerate((3, 1, 2), start=1):
        server.begin(step, seqs)
        count.copy_(torch.randint(0, most, count.shape))
        index.copy_(torch.randint(0, 32, index.shape))
        weights.copy_(torch.rand(weights.shape))
        out.fill_(-7.0)
        post.fill_(step)
        assert server.finish(2_000_000) == ""
        assert int(reply) == step
        want = weighted_sum(weights, index, count, plain, table)
        torch.testing.assert_close(out[:seqs], want[:seqs], atol=2e-4, rtol=1e-4)
        assert (out[seqs:] == -7).all()
    assert server.stop(1_000_000)


def test_a_list_that_claims_too_much_is_an_error() -> None:
    index, count = torch.zeros(1, 2, 4, dtype=torch.int32), torch.tensor([[5, 0]], dtype=torch.int32)
    values = ValueBlocks.of(torch.randn(2, 2, 8, 16))
    words = torch.zeros(32, dtype=torch.int32)
    server = extension.Mailbox(2_000_000)
    table = torch.zeros(1, 1, 2, dtype=torch.int32)
    plan = native.plan_weighted_sum(torch.zeros(1, 2, 4), index, count, source(values), table)
    server.add(plan.job, words[:1].data_ptr(), words[16:17].data_ptr(), 0)
    server.begin(1, 1)
    words[:1].fill_(1)
    start = time.perf_counter()
    assert "claims 5 entries" in server.finish(2_000_000)
    assert time.perf_counter() - start < 1
    server.stop(1_000_000)
