"""Attention over pools in 8 bits on tensor cores against PyTorch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.cards import CARDS, fits
from tests.kernels.pools import copied

from coattn.kernels.attend_pool import attend_near
from coattn.kernels.cuda import nvrtc
from coattn.kernels.cuda.nvrtc import FOLDER
from coattn.kernels.pool_memory import COLD, PoolTensors
from coattn.kernels.quantise.rows import PackedRows, formless
from coattn.kernels.scored_entries import Chosen
from coattn.kernels.softcap import softcap
from coattn.state import AttnState, Split
from coattn.types import BlockList, LayerShape
from coattn.units import ceil_div

pytest.importorskip("triton")
from coattn.kernels.cuda import attend_pool as cuda

KV_HEADS, BLOCK, SLOTS = 2, 32, 4


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("d", "group"), [(64, 5), (128, 5), (128, 16), (256, 2), (256, 16), (80, 8), (160, 1)])
def test_compiles(d: int, group: int, card: int) -> None:
    q, blocks = torch.zeros(1, 1, 2 * group, d), torch.zeros(1, 2, 2, 32, d)
    form = cuda.constants(q.half() if d == 64 else q.bfloat16(), blocks, 30.0 if d == 128 else None)
    assert form["GROUP"] * form["SHARE"] == group
    assert form["GROUP"] <= cuda.MOST_HEADS
    assert fits((FOLDER / "attend_pool.cu").read_text(), form, card, 32 * cuda.WARPS)


@pytest.mark.parametrize(
    ("heads", "d", "dtype", "says"),
    [
        (34, 128, torch.bfloat16, "17 query heads"),
        (8, 48, torch.float16, "heads of 48 channels"),
        (8, 512, torch.float16, "heads of 512 channels"),
        (8, 72, torch.float16, "heads of 72 channels"),
        (8, 128, torch.float32, "torch.float32"),
        (32, 256, torch.bfloat16, None),
    ],
)
def test_what_has_no_form_is_named(heads: int, d: int, dtype: torch.dtype, says: str | None) -> None:
    why = formless(LayerShape(heads, 2, d, dtype, torch.device("cpu")))
    assert why is says if says is None or why is None else says in why


def test_refused_without_a_gpu() -> None:
    assert cuda.refuses(LayerShape(10, 2, 128, torch.bfloat16, torch.device("cpu"))) is not None


@pytest.mark.parametrize("pairs", [1, 8, 80, 424])
@pytest.mark.parametrize("places", [16, 1024, 16384])
def test_pieces(pairs: int, places: int) -> None:
    slots = 396
    splits = cuda.splits_of(pairs, places, slots)
    assert 1 <= splits <= 64
    assert splits == 1 or places // splits >= 2 * 16 * cuda.WARPS
    if places == 16384 and pairs > 1:
        assert pairs * splits / (-(-pairs * splits // slots) * slots) > 0.8


def world(d: int, group: int, dtype: torch.dtype, places: int = 96) -> tuple[PoolTensors, Any]:
    """A pool of so many places, of which slot 0 lists most, slot 1 none and slot 2 32, with keys as models have them:
    far from zero, and channels of very different spread."""
    torch.manual_seed(0)
    gpu = torch.randn(9, KV_HEADS, 2, BLOCK, d).to(dtype)
    pool = PoolTensors.make(gpu, 0, SLOTS, 512, places, KV_HEADS * group, packed=True)
    assert pool.packed is not None
    for slot, count in ((0, places), (2, 32)):
        k = torch.randn(KV_HEADS, count, d) * torch.logspace(1, -2, d) + 20 * torch.randn(KV_HEADS, 1, d)
        tokens = torch.stack([torch.randperm(500)[:count] for _ in range(KV_HEADS)])
        pool.fill(slot, tokens, k, torch.randn(KV_HEADS, count, d), learn=k)
    for head in range(KV_HEADS):
        some = torch.randperm(places)[: places - 7 * head - 3].sort().values
        pool.packed.listed[0, head, : len(some)] = some.to(torch.int16)
        pool.packed.count[0, head] = len(some)
    table = torch.randint(0, 9, (4, 1, 3), dtype=torch.int32)
    lists = BlockList(table, torch.tensor([[70], [3], [0], [96]], dtype=torch.int32), 96)
    q = torch.randn(4, 1, KV_HEADS * group, d).to(dtype)
    return pool, (q, gpu, lists, torch.tensor([2, 1, 0, 3], dtype=torch.int32))


def cold(pool: PoolTensors, seq: torch.Tensor, splits: int, look: int) -> tuple[Chosen, dict[tuple[int, int], Any]]:
    """A choice of some tokens of each pool, and by row and head their places. Row 1's pool has none."""
    torch.manual_seed(3)
    rows, tokens, n = len(seq), torch.tensor([500, 500, 301, 0], dtype=torch.int32), 500
    ids = torch.full((rows, KV_HEADS, n), -1, dtype=torch.int32)
    count = torch.zeros(rows, KV_HEADS, splits, 3, dtype=torch.int32)
    places: dict[tuple[int, int], Any] = {}
    for row, slot in enumerate(seq.tolist()):
        for head in range(KV_HEADS):
            each = ceil_div(ceil_div(int(tokens[row]), look), splits) * look
            there = (pool.place_of[slot, head, : tokens[row]] >= 0).nonzero()[:, 0]
            there = there[torch.rand(len(there)) < 0.8]
            places[row, head] = pool.place_of[slot, head, there].long() % COLD
            for split in range(splits if len(there) else 0):
                own = there[there // each == split]
                last = min((split + 1) * each, int(tokens[row]))
                ids[row, head, last - len(own) : last] = own.flip(0).int()
                count[row, head, split] = torch.tensor([1, 2, len(own)])
    return Chosen(ids, ids[:, :, None], count, tokens, look), places


def looked_up(
    pool: PoolTensors, q: torch.Tensor, places: dict[tuple[int, int], Any], scale: float, cap: float | None, seq: Any
) -> AttnState:
    """The same by PyTorch."""
    assert pool.packed is not None
    group, d = q.shape[2] // KV_HEADS, q.shape[3]
    out, lse = torch.zeros(len(q), 1, q.shape[2], d), torch.full((len(q), 1, q.shape[2]), -torch.inf)
    for (row, head), found in places.items():
        if len(found):
            own = slice(head * group, (head + 1) * group)
            k, v = pool.packed.rows(int(seq[row]), head, found)
            scores = softcap(q[row, 0, own].float() @ k.T * scale, cap)
            out[row, 0, own], lse[row, 0, own] = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return AttnState(out, lse)


def check_looking_up(d: int, group: int, cap: float | None, dtype: torch.dtype, device: torch.device) -> None:
    """Pieces before and after are not touched; with more programs than tiles, and fewer."""
    pool, (q, _, _, seq) = world(d, group, dtype, places=288)
    for splits, look, programs in ((2, 64, 3), (8, 16, 1), (16, 32, 8)):
        chosen, places = cold(pool, seq, splits, look)
        assert sum(map(len, places.values())) > 200
        want = looked_up(pool, q, places, 0.02, cap, seq)
        there = Chosen(*(x.to(device) for x in (chosen.ids, chosen.later, chosen.count, chosen.tokens)), look)
        pieces = Split(
            torch.full((4, programs + 3, q.shape[2], d), 7.0, device=device),
            torch.full((4, programs + 3, q.shape[2]), 7.0, device=device),
        )
        own = copied(pool, device)
        cuda.look_up(q.to(device), own, seq.to(device), there, pieces, slice(2, programs + 2), 0.02, cap)
        for i in (0, 1, programs + 2):
            assert (pieces.out[:, i] == 7).all()
            assert (pieces.lse[:, i] == 7).all()
        got = Split(pieces.out[:, 2:-1].cpu(), pieces.lse[:, 2:-1].cpu()).merged()
        torch.testing.assert_close(got.lse, want.lse, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(got.out, want.out, atol=5e-3, rtol=5e-3)


FORMS = [
    (64, 7, None, torch.bfloat16),
    (128, 5, None, torch.float16),
    (128, 8, 30.0, torch.bfloat16),
    (128, 16, None, torch.bfloat16),
    (256, 2, None, torch.bfloat16),
    (256, 16, 50.0, torch.bfloat16),
    (80, 12, None, torch.float16),
    (96, 1, None, torch.bfloat16),
    (160, 4, None, torch.bfloat16),
    (192, 11, None, torch.float16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "group", "cap", "dtype"), FORMS)
def test_looking_up(d: int, group: int, cap: float | None, dtype: torch.dtype) -> None:
    check_looking_up(d, group, cap, dtype, torch.device("cuda"))


def check_attending(
    d: int, group: int, cap: float | None, dtype: torch.dtype, device: torch.device, places: int = 96
) -> None:
    """Over the window and the pool; what is heard of the pool's weight is the same, too."""
    pool, (q, gpu, lists, seq) = world(d, group, dtype, places)
    window, rest = attend_near(q.float(), gpu.float(), lists, pool, seq, 0.02, cap)
    want = rest().merged()
    there = BlockList(lists.table.to(device), lists.tokens.to(device), lists.longest)
    there_too = copied(pool, device)
    args = (q.to(device), gpu.to(device), there, there_too, seq.to(device), 0.02, cap)
    near, finish = cuda.attend_near(*args)
    torch.testing.assert_close(near.logsumexp(1).cpu(), window.logsumexp(1), atol=2e-3, rtol=2e-3)
    made = finish()
    heard = there_too.true_lse[seq.long().to(device)].logsumexp(1).cpu()
    torch.testing.assert_close(heard, pool.true_lse[seq.long()].logsumexp(1), atol=2e-3, rtol=2e-3)
    got = made.merged()
    torch.testing.assert_close(got.lse.cpu(), want.lse, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got.out.cpu(), want.out, atol=5e-3, rtol=5e-3)
    again = cuda.attend_near(*args)[1]()
    assert again.out.equal(made.out)


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "group", "cap", "dtype"), [*FORMS, (64, 1, 5.0, torch.float16)])
def test_equals_the_reference(d: int, group: int, cap: float | None, dtype: torch.dtype) -> None:
    check_attending(d, group, cap, dtype, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [3, 8])
def test_one_token_that_outweighs_all_and_many_alike(group: int) -> None:
    """Weights far apart: float16 holds the small ones, of which there are many."""
    device, d, places = torch.device("cuda"), 128, 4096
    torch.manual_seed(1)
    rows = PackedRows.make(2, 1, places, d, torch.device("cpu"))
    k, v = torch.randn(places, d) * 0.1, torch.randn(places, d) + 2
    q = torch.randn(1, 1, group, d)
    k[77] = q[0, 0, 0] * 2
    rows.learn(0, k[None])
    rows.put(0, 0, torch.arange(places), k, v)
    rows.count[0], rows.listed[0] = places, torch.arange(places).to(torch.int16)
    keys, values = rows.rows(0, 0, torch.arange(places))
    scores = q[0, 0].half().float() @ keys.T * 0.05
    want = scores.softmax(-1) @ values
    gpu = torch.zeros(1, 1, 2, BLOCK, d, dtype=torch.float16)
    pool = replace(PoolTensors.make(gpu, 0, 2, 64, places, group), packed=rows)
    none = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lists = BlockList(none[None], none, BLOCK)
    blocks = torch.zeros(1, 1, 2, BLOCK, d, dtype=torch.float16, device=device)
    seq = torch.zeros(1, dtype=torch.int32, device=device)
    got = cuda.attend_near(q.half().to(device), blocks, lists, copied(pool, device), seq, 0.05, None)[1]().merged()
    torch.testing.assert_close(got.lse[0, 0].cpu(), scores.logsumexp(-1), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(got.out[0, 0].cpu(), want, atol=4e-3, rtol=2e-3)
