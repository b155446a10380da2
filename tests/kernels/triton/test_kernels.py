"""The Triton kernels against their references: on the GPU where there is one, else under Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from coattn.kernels import experts
from coattn.kernels.append import append, write_rows
from coattn.kernels.attend import reference as attend_reference
from coattn.kernels.average import Average, update, weigh
from coattn.kernels.fetch_tokens import fetch_tokens
from coattn.kernels.invariant import invariant
from coattn.kernels.linear import linear_invariant
from coattn.kernels.note_case import NotedCases, note_case
from coattn.kernels.recall import recall
from coattn.kernels.sink_logits import sink_states, with_sink_piece
from coattn.parts.select.host_tokens import list_tokens, token_memory
from coattn.state import AttnState, Split, merge
from coattn.types import BlockList

pytest.importorskip("triton")
from tests.kernels.triton.addresses import checked

from coattn.kernels.triton import append as append_kernel
from coattn.kernels.triton import attend as attend_kernel
from coattn.kernels.triton import average as average_kernel
from coattn.kernels.triton import experts as expert_kernels
from coattn.kernels.triton import fetch_tokens as fetch_kernel
from coattn.kernels.triton import linear as linear_kernel
from coattn.kernels.triton import merge as merge_kernel
from coattn.kernels.triton import model as model_kernels
from coattn.kernels.triton import note_case as note_kernel
from coattn.kernels.triton import read_keys as read_kernel
from coattn.kernels.triton import recall as recall_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def lists(tokens: list[int], heads: int, block: int, blocks: int, seed: int) -> BlockList:
    """Random lists of blocks for sequences of these lengths; the ids past a list's end are out of range."""
    generator = torch.Generator().manual_seed(seed)
    width = max(1, -(-max(tokens) // block))
    table = torch.full((len(tokens), heads, width), 1 << 30, dtype=torch.int32)
    for i, n in enumerate(tokens):
        for h in range(heads):
            used = -(-n // block)
            table[i, h, :used] = torch.randperm(blocks, generator=generator)[:used].int()
    counts = torch.tensor(tokens, dtype=torch.int32)[:, None].expand(-1, heads).contiguous()
    return BlockList(table.to(DEVICE), counts.to(DEVICE), max(tokens))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("group", "kv_heads", "d", "block", "per_head", "softcap"),
    [
        (1, 2, 64, 32, False, None),
        (4, 2, 128, 32, True, None),
        (5, 1, 80, 16, False, None),
        (8, 2, 96, 32, False, 30.0),
        (7, 1, 32, 4, True, None),
    ],
)
def test_attend(group: int, kv_heads: int, d: int, block: int, per_head: bool, softcap: float | None) -> None:
    dtype = torch.float32
    q = random(3, 1, kv_heads * group, d, dtype=dtype)
    blocks = random(40, kv_heads, 2, block, d, dtype=dtype, seed=1)
    blocks[5] = torch.nan  # a block nobody lists must not matter
    picked = lists([3 * block + 1, 0, 17 * block], kv_heads if per_head else 1, block, 5, 2) if block > 100 else None
    picked = picked or lists([2 * block + 1, 0, 5 * block], kv_heads if per_head else 1, block, 5, 2)
    got = attend_kernel.attend(q, blocks, picked, d**-0.5, softcap).merged()
    want = attend_reference(q, blocks, picked, d**-0.5, softcap)
    torch.testing.assert_close(got.out, want.out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-5, rtol=1e-4)


def test_attend_single_tokens_of_larger_blocks() -> None:
    """Blocks seen as blocks of one token: values lie a block after the keys."""
    q, blocks = random(2, 1, 6, 32, dtype=torch.float32), random(6, 2, 2, 8, 32, dtype=torch.float32, seed=1)
    shared = BlockList(torch.tensor([[[3, 1, 5]], [[2, 0, 4]]], dtype=torch.int32, device=DEVICE), None, 24)  # type: ignore[arg-type]
    chosen = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(i))[:9] for i in range(4)])
    count = torch.tensor([[9, 4], [0, 7]], device=DEVICE)
    picked = list_tokens(shared, blocks, chosen.view(2, 2, 9).to(DEVICE), count)
    got = attend_kernel.attend(q, picked.memory, picked, 0.2, None).merged()
    plain = attend_reference(q, picked.memory, picked, 0.2, None)
    for seq, head in ((0, 0), (0, 1), (1, 1)):
        at = chosen.view(2, 2, 9)[seq, head, : int(count[seq, head])]
        ids = shared.table[seq, 0].cpu()[at // 8].long()
        k, v = blocks.cpu()[ids, head, :, at % 8].unbind(1)
        own = q.cpu()[seq, 0, 3 * head : 3 * head + 3]
        want = (own @ k.T * 0.2).softmax(-1) @ v
        for found in (got, plain):
            torch.testing.assert_close(found.out[seq, 0, 3 * head : 3 * head + 3].cpu(), want, atol=2e-5, rtol=1e-4)
    assert (got.lse[1, 0, :3] == -torch.inf).all()


def test_attend_in_many_pieces() -> None:
    q = random(2, 1, 4, 64, dtype=torch.float32)
    blocks = random(64, 2, 2, 32, 64, dtype=torch.float32, seed=1)
    picked = lists([1500, 70], 1, 32, 64, 3)
    got = attend_kernel.attend(q, blocks, picked, 0.125, None)
    assert got.out.shape[1] > 2
    want = attend_reference(q, blocks, picked, 0.125, None)
    torch.testing.assert_close(got.merged().out, want.out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got.merged().lse, want.lse, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("keep", "gain", "summed"), [(0.9, 0.1, False), (1.0, 1.0, True)])
@pytest.mark.parametrize(("group", "tokens"), [(4, [70, 0, 1]), (3, [1500, 64, 33])])
@pytest.mark.parametrize("sinks", [False, True])
def test_average(group: int, tokens: list[int], keep: float, gain: float, summed: bool, sinks: bool) -> None:
    q = random(3, 1, 2 * group, 32, dtype=torch.float32)
    blocks = random(64, 2, 2, 32, 32, dtype=torch.float32, seed=1)
    picked = lists(tokens, 1, 32, 64, 3)
    # no two sequences share a block: each entry's average has one writer
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4)).int().split([48, 8, 8])
    for row, ids in zip(picked.table[:, 0], order, strict=True):
        row[: len(ids)] = ids[: len(row)].to(DEVICE)
    values = random(64, 2, 2, 32, dtype=torch.float32, seed=2).abs()[:, :, 0]
    wanted = values.clone()
    weights = weigh(q, blocks, picked, 0.2, 20.0)
    logits = random(2 * group, dtype=torch.float32, seed=5) if sinks else None
    scores = attend_kernel.room_for_scores(q, picked)
    state = attend_kernel.attend(q, blocks, picked, 0.2, 20.0, scores=scores)
    update(Average(wanted, keep, gain, summed, logits), picked, weights, state.merged().lse)
    average_kernel.update(values, keep, gain, summed, picked, scores, with_sink_piece(state.lse, logits))
    torch.testing.assert_close(values, wanted, atol=2e-6, rtol=1e-4)
    assert not torch.equal(values, random(64, 2, 2, 32, dtype=torch.float32, seed=2).abs()[:, :, 0])


@pytest.mark.parametrize(("second", "tail"), [(0, False), (1, False), (3, False), (1, True), (3, True)])
@pytest.mark.parametrize("sinks", [False, True])
def test_merge(second: int, tail: bool, sinks: bool) -> None:
    def pieces(count: int, seed: int) -> Split:
        lse = random(2, count, 3, dtype=torch.float32, seed=seed)
        lse[0, 0, :] = -torch.inf
        lse[1, :, 1] = -torch.inf
        out = random(2, count, 3, 80, dtype=torch.float32, seed=seed + 1)
        out[lse == -torch.inf] = 0
        return Split(out, lse)

    sets = [pieces(5, 0)] + ([pieces(second, 10)] if second else [])
    if tail:
        sets.insert(1, pieces(1, 20))
    logits = random(3, dtype=torch.float32, seed=30) if sinks else None
    got = merge_kernel.merge(sets, torch.float32, DEVICE, logits)
    states = [AttnState(s.out[:, i], s.lse[:, i]) for s in sets for i in range(s.out.shape[1])]
    torch.testing.assert_close(got, merge(*states, *sink_states(states[0].out, logits)).out)


@pytest.mark.parametrize(("block", "flushes"), [(32, False), (32, True), (12, False), (12, True)])
def test_append(block: int, flushes: bool) -> None:
    """Also of blocks that are no power of two, whose steps are not captured."""
    k, v = (random(3, 2, 80, dtype=torch.float32, seed=i) for i in (1, 2))
    ids, places = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([4, 0, 6], [block - 1, 5, block - 1]))
    flush_to = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE) if flushes else None
    gpu = [random(8, 2, 2, block, 80, dtype=torch.float32, seed=3) for _ in range(2)]
    host = [random(3, 2, 2, block, 80, dtype=torch.float32, seed=4) for _ in range(2)]
    append_kernel.append(gpu[0], ids, places, k, v, host[0] if flushes else None, flush_to)
    append.reference(gpu[1], ids, places, k, v, host[1] if flushes else None, flush_to)
    assert torch.equal(gpu[0], gpu[1])
    assert torch.equal(host[0], host[1])


@pytest.mark.parametrize(("k", "d"), [(1, 24), (21, 128)])
def test_fetch_tokens(k: int, d: int) -> None:
    host = token_memory(random(6, 3, 2, 8, d, dtype=torch.float32, seed=1))
    to = [random(2 * k + 3, 3, 2, 1, d, dtype=torch.float32, seed=2) for _ in range(2)]
    draws = torch.Generator().manual_seed(3)
    blocks, rows = torch.randint(6, (2, 3, k), generator=draws), torch.randint(8, (2, 3, k), generator=draws)
    table = (blocks * 2 * 3 * 8 + rows).int().to(DEVICE)
    count = torch.tensor([[0, k, 1], [k // 2, 1, k]], dtype=torch.int32, device=DEVICE)
    fetch_kernel.fetch_tokens(to[0], host, table, count)
    fetch_tokens.reference(to[1], host, table, count)
    assert torch.equal(to[0], to[1])
    assert torch.equal(to[0][k, 2], host[table[1, 2, 0].long(), 2])
    assert torch.equal(to[0][: 2 * k, 0][:k], random(2 * k + 3, 3, 2, 1, d, dtype=torch.float32, seed=2)[:k, 0])


@pytest.mark.parametrize(("block", "d"), [(4, 24), (32, 128)])
def test_recall(block: int, d: int) -> None:
    host = random(6, 3, 2, block, d, dtype=torch.float32, seed=1)
    gpu = [random(9, 3, 2, block, d, dtype=torch.float32, seed=2) for _ in range(2)]
    to = torch.tensor([[[1, -1], [1, 2], [-1, -1]], [[0, 8], [-1, 4], [5, 6]]], dtype=torch.int32, device=DEVICE)
    source = torch.randint(6, (2, 3, 2), generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
    recall_kernel.recall(gpu[0], host, to, source)
    recall.reference(gpu[1], host, to, source)
    assert torch.equal(gpu[0], gpu[1])
    assert torch.equal(gpu[0][5, 2], host[source[1, 2, 0], 2])
    assert torch.equal(gpu[0][7], random(9, 3, 2, block, d, dtype=torch.float32, seed=2)[7])


@pytest.mark.parametrize(("block", "d", "tokens"), [(32, 128, 96), (16, 80, 77), (48, 64, 1)])
def test_write_rows(block: int, d: int, tokens: int) -> None:
    own, wanted = (random(9, 3, 2, block, d, dtype=torch.bfloat16) for _ in range(2))
    both = random(tokens, 3, 2 * d, dtype=torch.bfloat16, seed=1)
    k, v = both[..., :d], both[..., d:]
    at = torch.randperm(9 * block, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    append_kernel.write_rows(own, at // block, at % block, k, v)
    write_rows.reference(wanted, at // block, at % block, k, v)
    assert torch.equal(own, wanted)


@pytest.mark.parametrize(("block", "d", "tokens"), [(32, 128, 96), (16, 80, 77), (48, 64, 1)])
def test_listed_rows(block: int, d: int, tokens: int) -> None:
    blocks = random(9, 3, 2, block, d, dtype=torch.bfloat16)
    ids = torch.randperm(9, generator=torch.Generator().manual_seed(1))[: -(-tokens // block)].to(DEVICE)
    wanted = blocks[ids].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens]
    k, v = read_kernel.listed_rows(blocks, ids, tokens)
    assert torch.equal(k, wanted[0])
    assert torch.equal(v, wanted[1])
    assert k.is_contiguous()
    assert v.is_contiguous()


HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # which the interpreter multiplies rightly


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("n", "k", "most"), [(64, 192, 8), (40, 400, 48)])
def test_a_row_of_an_invariant_product_has_the_same_bits_among_others(
    n: int, k: int, most: int, dtype: torch.dtype
) -> None:
    """On Hopper by `product.cu` too: up to 16 tokens, weights of k = 192."""
    x, w, b, r = (random(*s, dtype=dtype, seed=i) for i, s in enumerate([(200, k), (n, k), (n,), (200, n)]))

    def made(at: slice) -> Tensor:
        return linear_invariant(x[at], w, b, r[at], most)

    alone = [made(slice(i, i + 1)) for i in range(7)]
    for count in (1, 7, 33, 200):
        if count <= most or most == 8:  # also more rows than tokens, as heads are
            together = made(slice(0, count))
            for i, own in enumerate(alone[:count]):
                assert torch.equal(together[i : i + 1], own), (count, i)
            assert torch.equal(made(slice(count - 1, count)), together[-1:])
    want = r[:7] + (x[:7].double() @ w.double().T + b).to(dtype)
    torch.testing.assert_close(torch.cat(alone), want, atol=2e-5 if dtype == torch.float32 else 0.2, rtol=2e-2)


@pytest.mark.parametrize("seqs", [9])
def test_an_invariant_attention_has_the_same_bits_among_others(seqs: int) -> None:
    q, blocks = random(seqs, 1, 4, 64, dtype=HALF), random(64, 2, 2, 32, 64, dtype=HALF, seed=1)
    picked = lists([1900, 70, 0, *range(1, 40 * (seqs - 3), 40)], 1, 32, 64, 3)

    def attended(at: slice) -> Tensor:
        own = BlockList(picked.table[at], picked.tokens[at], picked.longest)
        state = attend_kernel.attend(q[at], blocks, own, 0.125, None)
        return merge_kernel.merge([state], HALF, DEVICE)

    alone = [attended(slice(i, i + 1)) for i in range(3)]
    with invariant(seqs):
        rows = attended(slice(0, seqs))
        fixed = [attended(slice(i, i + 1)) for i in range(seqs)]
    assert all(torch.equal(rows[i : i + 1], own) for i, own in enumerate(fixed))
    torch.testing.assert_close(torch.cat(alone), rows[:3], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 50, 96), (1, 8, 2048), (3, 40, 300), (16, 33, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(tokens: int, n: int, k: int, bias: bool) -> None:
    x, w, b = (random(*s, dtype=torch.float32, seed=i) for i, s in enumerate([(1, tokens, k), (n, k), (n,)]))
    r = random(1, tokens, n, dtype=torch.float32, seed=9)
    got = linear_kernel.linear(x, w, b if bias else None, r)
    torch.testing.assert_close(got, r + torch.nn.functional.linear(x, w, b if bias else None), atol=2e-5, rtol=1e-4)


def test_model_kernels() -> None:
    wide = random(1, 3, 6, 40, dtype=torch.float32)
    weight = random(40, dtype=torch.float32, seed=1)

    def normed(x: Tensor, w: Tensor = weight) -> Tensor:
        return w * x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    torch.testing.assert_close(model_kernels.rms_norm(wide, weight, 1e-5), normed(wide))
    got = model_kernels.rms_norm(wide, weight, 1e-5, model_kernels.SHIFTED)
    torch.testing.assert_close(got, normed(wide, weight + 1))
    x, residual = random(1, 3, 40, dtype=torch.float32, seed=7), random(1, 3, 40, dtype=torch.float32, seed=8)
    late, shifted = (weight, 1e-5, model_kernels.LATE), (weight, 1e-5, model_kernels.SHIFTED)
    total, after = model_kernels.add_norm(x, residual, late, shifted)
    torch.testing.assert_close(total, residual + normed(x))
    torch.testing.assert_close(after, normed(total, weight + 1))
    total, after = model_kernels.add_norm(x, residual, None, late)
    torch.testing.assert_close((total, after), (residual + x, normed(residual + x)))
    torch.testing.assert_close(model_kernels.add_norm(x, residual, late, None)[1], residual + normed(x))
    sliced = random(1, 3, 100, dtype=torch.float32)
    gate, up = sliced[..., :48], sliced[..., 50:98]
    torch.testing.assert_close(model_kernels.gated(gate, up), torch.nn.functional.silu(gate) * up)
    for shape in ((6, 40), (3, 2, 40), (3, 1, 2, 40)):  # experts and states have tokens along another axis
        other, again = (random(*shape, dtype=torch.float32, seed=seed) for seed in (5, 6))
        torch.testing.assert_close(model_kernels.rms_norm(other, weight, 1e-5), normed(other))
        if len(shape) < 4:
            want = torch.nn.functional.silu(other) * again
            torch.testing.assert_close(model_kernels.gated(other, again), want)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(model_kernels.gated(gate, up, "gelu_tanh"), want)
    both = random(1, 3, 4, 60, dtype=torch.float32)  # heads, each with its gate after something else
    up = random(1, 3, 4, 40, dtype=torch.float32, seed=1)
    torch.testing.assert_close(model_kernels.gated(both[..., 20:], up, "sigmoid"), both[..., 20:].sigmoid() * up)
    q, k = random(1, 4, 3, 32, dtype=torch.float32), random(1, 2, 3, 32, dtype=torch.float32, seed=1)
    cos, sin = random(1, 3, 32, dtype=torch.float32, seed=2), random(1, 3, 32, dtype=torch.float32, seed=3)

    def rotated(x: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([-x[..., 16:], x[..., :16]], -1) * sin[:, None]

    for got, own in zip(model_kernels.rotary(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(got, rotated(own))


@pytest.mark.parametrize(("tokens", "q_heads", "kv_heads"), [(3, 4, 2), (18, 4, 2), (17, 3, 1), (17, 5, 0)])
@pytest.mark.parametrize("normed", [False, True])
def test_prepare_heads(normed: bool, tokens: int, q_heads: int, kv_heads: int) -> None:
    d = 32
    x = random(1, tokens, (q_heads + 2 * kv_heads) * d, dtype=torch.float32)
    cos, sin = random(1, tokens, d, dtype=torch.float32, seed=2), random(1, tokens, d, dtype=torch.float32, seed=3)
    weights = (random(d, dtype=torch.float32, seed=4), random(d, dtype=torch.float32, seed=5))
    norms = (*weights, 1e-5, model_kernels.LATE) if normed else None
    got = model_kernels.prepare_heads(x, cos, sin, q_heads, kv_heads, d, norms)
    heads = x.view(1, tokens, -1, d)
    parts = (heads[:, :, :q_heads], heads[:, :, q_heads : q_heads + kv_heads])
    if normed:
        parts = tuple(model_kernels.rms_norm(p, w, 1e-5) for p, w in zip(parts, weights, strict=True))
    want = model_kernels.rotary(*(p.transpose(1, 2) for p in parts), cos, sin)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("d", "turned", "pairs"), [(32, 16, False), (24, 8, True), (16, 16, True)])
def test_prepare_heads_that_are_turned_in_part(d: int, turned: int, pairs: bool) -> None:
    """And with something else after each query, normed with one added to the weights."""
    step, size = d + 8, (1, 3)
    x = random(*size, 4 * step + 2 * d + 2 * d, dtype=torch.float32)
    cos, sin = (random(*size, turned, dtype=torch.float32, seed=seed) for seed in (2, 3))
    weights = random(d, dtype=torch.float32, seed=4), random(d, dtype=torch.float32, seed=5)
    norms = (*weights, 1e-5, model_kernels.SHIFTED)
    got = model_kernels.prepare_heads(x, cos, sin, 4, 2, d, norms, step, pairs)
    own = x[..., : 4 * step].view(*size, 4, step)[..., :d], x[..., 4 * step : 4 * step + 2 * d].view(*size, 2, d)
    angles = (cos, sin)
    if pairs:
        angles = tuple(y[..., : turned // 2].repeat_interleave(2, -1) for y in angles)
    for part, each, weight in zip(got, own, weights, strict=True):
        y = (each * (each.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + weight)).transpose(1, 2)
        z = y[..., :turned]
        if pairs:
            other = torch.stack([-z[..., 1::2], z[..., ::2]], -1).flatten(-2)
        else:
            other = torch.cat([-z[..., turned // 2 :], z[..., : turned // 2]], -1)
        z = z * angles[0][:, None] + other * angles[1][:, None]
        torch.testing.assert_close(part, torch.cat([z, y[..., turned:]], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "top", "count"), [(1, 2, 8), (1, 5, 6), (3, 2, 4), (40, 3, 4)])
def test_experts(tokens: int, top: int, count: int) -> None:
    """One token; a few that share experts; more than one expert takes at once."""
    hidden, inner, dtype = 48, 40, torch.float32
    x, w = random(tokens, hidden, dtype=dtype), random(tokens, top, dtype=dtype, seed=1)
    wide, down = (
        random(count, 2 * inner, hidden, dtype=dtype, seed=2),
        random(count, hidden, inner, dtype=dtype, seed=3),
    )
    index = random(tokens, count, dtype=dtype, seed=4).argsort(-1)[:, :top].contiguous()
    got = expert_kernels.experts(x, index, w, wide, down)
    want = experts.experts(x, index, w, wide, down)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    got = expert_kernels.experts(x, index, w, wide, down, 2 * x)
    torch.testing.assert_close(got, want + 2 * x, atol=2e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_experts_of_a_whole_model(tokens: int) -> None:
    """Shapes of Qwen3-30B-A3B."""
    dtype, count, top = torch.bfloat16, 128, 8
    x, w = random(tokens, 2048, dtype=dtype), random(tokens, top, dtype=dtype, seed=1)
    wide, down = (0.02 * torch.randn(count, *n, device=DEVICE, dtype=dtype) for n in ((1536, 2048), (2048, 768)))
    index = random(tokens, count, dtype=dtype, seed=4).argsort(-1)[:, :top].contiguous()
    got, want = (m.experts(x, index, w, wide, down).float() for m in (expert_kernels, experts))
    assert (got - want).norm() < 0.01 * want.norm()


def test_angles_of_other_channels_are_refused() -> None:
    """Kernels would read past the end of the angles, or of a head."""
    q, angle = random(1, 2, 3, 32, dtype=torch.float32), random(1, 3, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="angles of 8 channels of 32"):
        model_kernels.rotary(q, q, angle.cos(), angle.sin())
    with pytest.raises(ValueError, match="angles of 8 channels of 4"):
        model_kernels.prepare_heads(random(1, 3, 16, dtype=torch.float32), angle.cos(), angle.sin(), 2, 1, 4)


def test_the_interpreter_finds_loads_outside_of_tensors() -> None:
    if DEVICE.type == "cuda":
        pytest.skip("kernels are not interpreted")
    weight = random(40, dtype=torch.float32)
    x = random(1, 3, 40, dtype=torch.float32)

    def run() -> None:
        with checked():
            with pytest.raises(Exception, match="outside every tensor"):
                model_kernels.rms_norm(x, weight[:32].clone(), 1e-5)
            model_kernels.rms_norm(x, weight, 1e-5)

    with pytest.raises(AssertionError, match="8 of 40 elements of 4 bytes lie outside every tensor"):
        run()


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_route(kind: str, norm: bool, biased: bool) -> None:
    logits, bias = random(4, 12, dtype=torch.float32), random(12, dtype=torch.float32, seed=1) if biased else None
    routing = experts.Routing(kind, 5, norm, 1.5)
    for got, want in zip(
        *(m.route(logits, bias, routing, torch.float32) for m in (expert_kernels, experts)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_token_without_numbers_has_experts_that_exist() -> None:
    _, index = expert_kernels.route(
        torch.full((1, 5), float("nan"), device=DEVICE), None, experts.Routing("softmax", 2, True), torch.float32
    )
    assert (index < 5).all()


def test_note_case() -> None:
    """Four rows: two name this layer, one another, one is padding."""
    group, kv_heads, d, block, slots = 3, 2, 24, 4, 5
    q, out = (random(4, kv_heads * group, d, dtype=torch.float32, seed=i) for i in (1, 2))
    near, far = (random(4, pieces, kv_heads * group, dtype=torch.float32, seed=i) for i, pieces in ((3, 2), (4, 3)))
    near[1, 0] = -torch.inf
    memory = random(9, kv_heads, 2, block, d, dtype=torch.float32, seed=5)
    numbers = [[7, 7, 2, -1], [1, 0, 1, 0], [4, 2, 0, 0], [8, 3, 1, 0]]
    layers, heads, owners, blocks = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in numbers)
    found = []
    for run in (note_case.reference, note_kernel.note_case):
        into = NotedCases.zeros(slots, group, d, block, DEVICE)
        run(q, out, near, far, memory, blocks, into, (layers, heads, owners), 7)
        found.append(into.rows)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[0].any(1).tolist() == [False, False, True, False, True]
