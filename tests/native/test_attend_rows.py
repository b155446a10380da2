"""Attention over single entries: every kernel the machine has against float64 over the same entries."""

import pytest
import torch

from coattn import native


def lists(rows, kv_heads, most):
    """Some entries of each sequence and KV head, in any order; what lies past the count is nonsense."""
    index = torch.full((len(rows), kv_heads, most), 1 << 30, dtype=torch.int32)
    count = torch.zeros(len(rows), kv_heads, dtype=torch.int32)
    for i, (k, _) in enumerate(rows):
        for h in range(kv_heads):
            n = min(most, (len(k) * (h + 1)) // (kv_heads + 1))
            index[i, h, :n] = torch.randperm(len(k))[:n].int()
            count[i, h] = n
    return index, count


@pytest.mark.parametrize("head_size", [64, 128, 80])
@pytest.mark.parametrize("element", ["f32", "bf16", "f16", "int8"])
def test_entries(kv, isa, element, head_size):
    torch.manual_seed(head_size)
    for group, lengths in ((1, [0, 1, 33]), (5, [130, 2, 64]), (16, [300])):
        dtype = kv.dtypes.get(element, torch.bfloat16)
        rows = [tuple(torch.randn(2, n, 2, head_size).to(dtype)) for n in lengths]
        q = torch.randn(len(rows), 2 * group, head_size).to(dtype)
        blocks, table, _ = kv.fill(rows, element, 32)
        index, count = lists(rows, 2, 200)
        got = native.plan_attend_rows(q, blocks, table, index, count).run()
        for i, (k, _) in enumerate(rows):
            keys, values = kv.stored(blocks, table[i, 0, : -(-len(k) // 32)], len(k))
            for h in range(2):
                n, mine = int(count[i, h]), slice(h * group, (h + 1) * group)
                if not n:
                    assert (got.lse[i, mine] == -torch.inf).all()
                    assert (got.out[i, mine] == 0).all()
                    continue
                own = [x[index[i, h, :n].long(), h : h + 1] for x in (keys, values)]
                exact, plain = (kv.attention(q[i, mine], *own, t) for t in (torch.float64, torch.float32))
                amx = "amx" in native.attend_kernel_name("f32" if element == "int8" else element, q.dtype, group)
                kv.assert_close(got.out[i, mine], plain[0], exact[0], 3e-5 if amx else 2e-6)
                kv.assert_close(got.lse[i, mine], plain[1], exact[1], 3e-5 if amx else 2e-6)


def test_refusals(kv):
    rows = [tuple(torch.randn(2, 40, 2, 64))]
    blocks, table, _ = kv.fill(rows, "f32", 32)
    index, count = lists(rows, 2, 16)
    q = torch.randn(1, 2, 64)
    beyond = index.clone()
    beyond[0, 1, 3] = 64
    with pytest.raises(native.NativeError, match="Entry 64 is outside the 64 there are"):
        native.plan_attend_rows(q, blocks, table, beyond, count).run()
    with pytest.raises(native.NativeError, match="claims 17 entries"):
        native.plan_attend_rows(q, blocks, table, index, torch.full_like(count, 17)).run()


def test_the_same_on_every_run(kv, isa):
    torch.manual_seed(1)
    rows = [tuple(torch.randn(2, 900, 2, 64).to(torch.bfloat16)) for _ in range(2)]
    blocks, table, _ = kv.fill(rows, "bf16", 32)
    index, count = lists(rows, 2, 700)
    q = torch.randn(2, 6, 64, dtype=torch.bfloat16)
    first, second = (native.plan_attend_rows(q, blocks, table, index, count).run() for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
