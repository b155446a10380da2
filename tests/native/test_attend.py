"""attend: every kernel the machine has against float64, over element types, head sizes, group sizes and lengths."""

import math

import pytest
import torch
from tests.native.conftest import attend, kernel_name

from coattn import native

LENGTHS = [0, 1, 31, 32, 33, 63, 130]
COMMON = (64, 128)
"""Head sizes with every group; of others the rest of a row matters, whatever the group."""
FLOATS = ["f32", "bf16", "f16"]


def make(lengths, kv_heads, head_size, dtype, q_shape):
    rows = [tuple(torch.randn(2, n, kv_heads, head_size).to(dtype)) for n in lengths]
    return rows, torch.randn(len(lengths), *q_shape, head_size).to(dtype)


def floor_of(element, q, group):
    # tiles round weights to two bf16 halves, about 2^-16; everything else is float32 throughout
    return 3e-5 if "amx" in kernel_name(element, q.dtype, group) else 2e-6


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 72, 40, 8])
@pytest.mark.parametrize("element", FLOATS)
def test_shapes(kv, isa, element, head_size):
    torch.manual_seed(head_size)
    for group in (1, 2, 3, 5, 8, 19) if head_size in COMMON else (3, 8):
        rows, q = make(LENGTHS, 2, head_size, kv.dtypes[element], (2 * group,))
        blocks, table, tokens = kv.fill(rows, element, 32)
        got = attend(q, blocks, table, tokens, weights=True)
        for i, (k, v) in enumerate(rows):
            exact = kv.attention(q[i], k, v, torch.float64)
            plain = kv.attention(q[i], k, v, torch.float32)
            floor = floor_of(element, q, group)
            kv.assert_close(got.out[i], plain[0], exact[0], floor)
            kv.assert_close(got.lse[i], plain[1], exact[1], floor)
            kv.assert_close(got.weights[i, :, : len(k)], plain[2], exact[2], floor)
            assert (got.weights[i, :, len(k) :] == 0).all()


@pytest.mark.parametrize("head_size", [64, 80, 128, 136, 192, 256, 24])
def test_quantised(kv, isa, head_size):
    """Against attention over the dequantised rows the kernel is nearly exact; the codes' own error is much larger."""
    torch.manual_seed(head_size)
    for group in (1, 2, 5, 13) if head_size in COMMON else (2, 13):
        rows, q = make(LENGTHS, 2, head_size, torch.bfloat16, (2 * group,))
        # keys have outlier channels with an offset, as real ones do
        rows = [(k + 4 * (torch.arange(head_size) % 16 == 3), v) for k, v in rows]
        blocks, table, tokens = kv.fill(rows, "int8", 32)
        got = attend(q, blocks, table, tokens)
        for i, (k, v) in enumerate(rows):
            stored = kv.stored(blocks, table[i, 0, : -(-len(k) // 32)], len(k))
            exact = kv.attention(q[i], *stored, torch.float64)
            original = kv.attention(q[i], k, v, torch.float64)
            # query and weights are rounded to 15 or 16 bits in the integer kernels
            kv.assert_close(got.out[i], exact[0], exact[0], 1e-3)
            kv.assert_close(got.lse[i], exact[1], exact[1], 2e-3)
            kv.assert_close(got.out[i], exact[0], original[0], 1e-3)


@pytest.mark.parametrize("element", [*FLOATS, "int8"])
@pytest.mark.parametrize("block", [1, 16, 48, 64, 100, 256])
def test_block_sizes(kv, isa, element, block):
    torch.manual_seed(block)
    rows, q = make([block, 3 * block + 1, 2 * block - 1], 2, 64, torch.float32, (6,))
    blocks, table, tokens = kv.fill(rows, element, block)
    got = attend(q, blocks, table, tokens)
    for i, (k, _) in enumerate(rows):
        stored = kv.stored(blocks, table[i, 0, : -(-len(k) // block)], len(k))
        exact, plain = (kv.attention(q[i], *stored, dtype) for dtype in (torch.float64, torch.float32))
        kv.assert_close(got.out[i], plain[0], exact[0], 1e-3 if element == "int8" else 2e-6)


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_types(kv, isa, element, q_dtype):
    torch.manual_seed(1)
    rows, q = make([77], 1, 128, kv.dtypes[element], (4,))
    q = q.to(q_dtype)
    blocks, table, tokens = kv.fill(rows, element, 32)
    got = attend(q, blocks, table, tokens)
    exact, plain = (kv.attention(q[0], *rows[0], dtype) for dtype in (torch.float64, torch.float32))
    kv.assert_close(got.out[0], plain[0], exact[0], floor_of(element, q, 4))


@pytest.mark.parametrize("element", FLOATS)
def test_softcap_and_scale(kv, isa, element):
    torch.manual_seed(2)
    rows, q = make([0, 5, 130], 2, 128, kv.dtypes[element], (10,))
    blocks, table, tokens = kv.fill(rows, element, 32)
    options = {"scale": 0.3, "softcap": 2.5}
    got = attend(q, blocks, table, tokens, **options, weights=True)
    for i, (k, v) in enumerate(rows):
        exact, plain = (kv.attention(q[i], k, v, dtype, **options) for dtype in (torch.float64, torch.float32))
        floor = floor_of(element, q, 5)
        kv.assert_close(got.out[i], plain[0], exact[0], floor)
        kv.assert_close(got.lse[i], plain[1], exact[1], floor)
        kv.assert_close(got.weights[i, :, : len(k)], plain[2], exact[2], floor)


@pytest.mark.parametrize("q_tokens", [1, 3, 16, 64])
def test_query_tokens(kv, isa, q_tokens):
    """Several query tokens over one list, up to a group of 512: what append does over older context."""
    torch.manual_seed(3)
    for element in ("bf16", "int8"):
        rows, q = make([0, 77, 150], 1, 64, torch.bfloat16, (q_tokens, 8))
        blocks, table, tokens = kv.fill(rows, element, 32)
        got = attend(q, blocks, table, tokens)
        assert got.out.shape == q.shape
        for i, (k, v) in enumerate(rows):
            if element == "int8":
                k, v = kv.stored(blocks, table[i, 0, : -(-len(k) // 32)], len(k))
            exact, plain = (kv.attention(q[i], k, v, dtype) for dtype in (torch.float64, torch.float32))
            kv.assert_close(got.out[i], plain[0], exact[0], 1e-3 if element == "int8" else floor_of(element, q, 512))


def test_lists_per_head(kv, isa):
    """table_heads = kv_heads: each KV head has blocks and a length of its own."""
    torch.manual_seed(4)
    (k, v), (k2, v2) = (torch.randn(2, 96, 2, 64) for _ in range(2))
    blocks, table, _ = kv.fill([(k, v), (k2, v2)], "f32", 32)
    # head 0 attends to sequence 0's blocks in reverse, head 1 to sequence 1's first and part of its third
    lists = torch.stack([table[0, 0].flip(0), table[1, 0][[0, 2, 1]]])[None].contiguous()
    tokens = torch.tensor([[96, 40]], dtype=torch.int32)
    q = torch.randn(1, 6, 64)
    got = attend(q, blocks, lists, tokens)
    exact0 = kv.attention(q[0, :3], k[:, :1], v[:, :1], torch.float64)
    pick = [*range(32), *range(64, 72)]
    exact1 = kv.attention(q[0, 3:], k2[pick, 1:], v2[pick, 1:], torch.float64)
    kv.assert_close(got.out[0], got.out[0], torch.cat([exact0[0], exact1[0]]), 2e-6)
    torch.testing.assert_close(got.out[0].double(), torch.cat([exact0[0], exact1[0]]), atol=2e-6, rtol=0)


def test_nan_and_inf(kv, isa):
    """A NaN key makes its queries NaN and nobody else's; keys that score -inf weigh nothing."""
    k, v = torch.randn(2, 40, 2, 64)
    k[7, 0, 3] = math.nan
    q = torch.randn(1, 4, 64)
    blocks, table, tokens = kv.fill([(k, v)], "f32", 32)
    got = attend(q, blocks, table, tokens)
    assert got.out[0, :2].isnan().all()
    assert got.lse[0, :2].isnan().all()
    assert got.out[0, 2:].isfinite().all()
    k = torch.ones(40, 1, 64)
    k[:33] = -math.inf
    v = torch.randn(40, 1, 64)
    blocks, table, tokens = kv.fill([(k, v)], "f32", 32)
    got = attend(torch.ones(1, 1, 64), blocks, table, tokens, weights=True)
    torch.testing.assert_close(got.out[0, 0], v[33:].mean((0, 1)), atol=1e-6, rtol=0)
    assert (got.weights[0, 0, :33] == 0).all()
    tokens[:] = 33
    got = attend(torch.ones(1, 1, 64), blocks, table, tokens, weights=True)
    assert got.lse.item() == -math.inf
    assert (got.out == 0).all()
    assert (got.weights == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("element", ["bf16", "int8"])
def test_repeats_are_bit_identical(kv, isa, threads, element):
    """Also when one long list is cut into pieces that different workers take in any order."""
    torch.manual_seed(6)
    rows, q = make([3000, 10, 0, 700], 2, 64, torch.bfloat16, (8,))
    blocks, table, tokens = kv.fill(rows, element, 32)
    try:
        native.set_threads(threads)
        call = native.plan_attend(q, blocks, table, tokens, weights=True)
        first = [x.clone() for x in call.run() if x is not None]
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, call.run(), strict=True))
    finally:
        native.set_threads(0)
    for i, (k, v) in enumerate(rows):
        if element == "int8":
            k, v = kv.stored(blocks, table[i, 0, : -(-len(k) // 32)], len(k))
        exact = kv.attention(q[i], k, v, torch.float64)
        kv.assert_close(first[0][i], exact[0], exact[0], 3e-5 if element == "bf16" else 1e-3)


@pytest.mark.parametrize("element", ["bf16", "int8"])
def test_lists_cut_apart_have_the_same_bits_in_any_company(kv, isa, element):
    """Lists of more than one piece and of less; without `apart` the cuts hang on all of them."""
    torch.manual_seed(6)
    lengths = [3000, 10, 0, 1500, 2049]
    rows, q = make(lengths, 2, 64, torch.bfloat16, (8,))
    blocks, table, tokens = kv.fill(rows, element, 32)
    try:
        native.set_threads(3)

        def ran(which, apart):
            given = q[which].contiguous(), blocks, table[which].contiguous(), tokens[which].contiguous()
            return native.plan_attend(*given, apart=apart).run()[:2]

        def differing(apart):
            whole = ran(list(range(len(lengths))), apart)
            return [
                i for i in range(len(lengths)) if not all(map(torch.equal, [x[[i]] for x in whole], ran([i], apart)))
            ]

        assert differing(True) == []
        assert differing(False) != []
        whole, plain = (ran(list(range(len(lengths))), apart) for apart in (True, False))
        for own, other in zip(whole, plain, strict=True):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    finally:
        native.set_threads(0)


def test_merges_with_the_rest(kv, isa):
    """Two halves of a list, merged as the algebra says, equal the whole."""
    torch.manual_seed(7)
    rows, q = make([160], 2, 128, torch.bfloat16, (8,))
    blocks, table, tokens = kv.fill(rows, "bf16", 32)
    whole = attend(q, blocks, table, tokens)
    a = attend(q, blocks, table[..., :2].contiguous(), torch.tensor([[64]], dtype=torch.int32))
    b = attend(q, blocks, table[..., 2:].contiguous(), torch.tensor([[96]], dtype=torch.int32))
    lse = torch.logaddexp(a.lse, b.lse)
    out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
    torch.testing.assert_close(out, whole.out, atol=3e-5, rtol=0)
    torch.testing.assert_close(lse, whole.lse, atol=3e-5, rtol=0)


def test_refusals(kv):
    rows, q = make([40], 2, 64, torch.float32, (4,))
    blocks, table, tokens = kv.fill(rows, "f32", 32)
    with pytest.raises(native.NativeError, match="claims 65 tokens") as caught:
        attend(q, blocks, table, torch.tensor([[65]], dtype=torch.int32))
    assert caught.value.hint
    with pytest.raises(native.NativeError, match="is not one of the arena's"):
        attend(q, blocks, torch.full_like(table, 99), tokens)
    with pytest.raises(native.NativeError, match=r"where torch\.int32 is needed"):
        attend(q, blocks, table.long(), tokens)
    with pytest.raises(native.NativeError, match="cannot share"):
        attend(q[:, :3], blocks, table, tokens)
    with pytest.raises(native.NativeError, match="head size"):
        attend(torch.randn(1, 4, 128), blocks, table, tokens)
    with pytest.raises(native.NativeError, match="too small"):
        native.Blocks(torch.zeros(2, 64, dtype=torch.uint8), "bf16", 32, 1, 64)
    with pytest.raises(native.NativeError, match="hold values alone"):
        native.Blocks(torch.zeros(2, 4096, dtype=torch.uint8), "int4", 32, 1, 64)
    with pytest.raises(native.NativeError, match="no attention over int4"):
        kernel_name("int4", torch.bfloat16, 4)
    with pytest.raises(native.NativeError, match="multiple of 8"):
        native.block_layout("bf16", 32, 60)
    with pytest.raises(native.NativeError, match="no element type"):
        native.block_layout("fp8", 32, 64)


SHAPES_OF_SCORES = {
    "flat": lambda at: 0 * at,
    "first": lambda at: 20.0 * (at == 0),
    "last": lambda at: 20.0 * (at == 1),
    "rising": lambda at: 15 * at,
    "falling": lambda at: 15 * (1 - at),
    "spikes": lambda at: 15.0 * (torch.rand(len(at)) < 0.03),
    "equal": None,
}


@pytest.mark.parametrize("element", ["bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES_OF_SCORES)
def test_scores_far_apart(kv, isa, element, shape):
    """Scores up to some thousands, that grow or fall along the list, or are all the same; small and odd blocks."""
    torch.manual_seed(7)
    for amplitude, block, group, head_size in ((1, 8, 4, 64), (5, 16, 8, 128), (30, 32, 5, 96), (200, 32, 9, 64)):
        lengths = [1, 33, 97, 200]
        q = (torch.randn(len(lengths), 2 * group, head_size) * amplitude).bfloat16()
        rows = []
        for i, n in enumerate(lengths):
            k, v = torch.randn(2, n, 2, head_size)
            if shape == "equal":
                k = k[:1].expand_as(k)
            else:
                towards = torch.nn.functional.normalize(q[i].float().view(2, group, head_size)[:, 0], dim=-1)
                k = k + SHAPES_OF_SCORES[shape](torch.arange(n) / max(1, n - 1))[:, None, None] * towards
            rows.append((k.bfloat16(), v.bfloat16()))
        blocks, table, tokens = kv.fill(rows, element, block)
        got = attend(q, blocks, table, tokens)
        for i, (k, _) in enumerate(rows):
            ids = table[i, 0, : -(-len(k) // block)]
            exact = kv.attention(q[i], *kv.stored(blocks, ids, len(k)), torch.float64)
            largest = float(exact[1].abs().max())
            # the integer kernels round queries to 15 bits, so their scores are off by a part of the largest
            slack = 2e-5 * (1 + largest) if element == "bf16" else 3e-4 * (1 + largest)
            assert (got.lse[i] - exact[1]).abs().max() < slack
            wrong = (got.out[i] - exact[0]).norm(dim=-1) / exact[0].norm(dim=-1)
            assert wrong.max() < (1e-3 if element == "bf16" else 0.05)
