"""Sketches and the entries that they choose: kernels against PyTorch."""

import itertools

import pytest
import torch
from tests.kernels.pools import copied

from coattn.kernels import attend_scored as plain_attend
from coattn.kernels import sketch as plain
from coattn.kernels.attend_pool import attend_rows, pool_rows
from coattn.kernels.fill_pool import fill_pool, weights
from coattn.kernels.pool_memory import COLD, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks, pack_blocks, scales_of, unpack_blocks
from coattn.kernels.quantise.sketch import WORD, Sketched, Sketcher, fit, spread_of
from coattn.kernels.rest import Rest, sum_rest
from coattn.kernels.scored_entries import Chosen, ScoredEntries
from coattn.kernels.token_pool import bring, renew_pool
from coattn.state import Split
from coattn.units import ceil_div

pytest.importorskip("triton")
from coattn.kernels.triton import attend_scored as attending
from coattn.kernels.triton import fill_pool as filling
from coattn.kernels.triton import sketch as kernel
from coattn.kernels.triton import token_pool as renewing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KV_HEADS, BLOCK, D = 2, 16, 32


def sketcher_of(planes: int) -> Sketcher:
    return fit(spread_of(torch.randn(300, KV_HEADS, D), None), planes)


def on(device: torch.device, sketcher: Sketcher) -> Sketcher:
    return Sketcher(*(x.to(device) for x in sketcher.tensors()))


def sums_of(memory: torch.Tensor, sketcher: Sketcher) -> torch.Tensor:
    """Of all there is, for each of four slots."""
    k, v = memory.permute(2, 0, 3, 1, 4).flatten(1, 2)
    return sum_rest(k, v, sketcher).repeat(4, 1, 1)


def filled_pool(
    memory: torch.Tensor,
    table: torch.Tensor,
    seq: torch.Tensor,
    slots: int,
    tokens: int,
    q_heads: int,
    small: bool = False,
    hot: int = 4 * BLOCK * 2 // 3,
) -> PoolTensors:
    """Pools of four blocks that hold some tokens of every row."""
    gpu = torch.zeros(4 * slots, KV_HEADS, 2, BLOCK, D)
    made = PoolTensors.make(gpu, 0, slots, tokens, 4 * BLOCK, q_heads, pins=BLOCK // 2, packed=small, hot=hot)
    for row, slot in enumerate(seq.tolist()):
        if slot == slots - 1:
            continue
        chosen = torch.stack([torch.randperm(128)[: 4 * BLOCK] for _ in range(KV_HEADS)])
        k, v = (torch.stack([rows_of(memory, table[row], chosen[h], h, i) for h in range(KV_HEADS)]) for i in range(2))
        made.fill(slot, chosen, k, v, learn=3 * k + 1)
    return made


def rows_of(memory: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor, head: int, which: int) -> torch.Tensor:
    return memory[blocks[tokens // BLOCK].long(), head, which, tokens % BLOCK]


Kept = torch.Tensor | PackedBlocks


def kept(memory: torch.Tensor, packed: bool) -> tuple[torch.Tensor, Kept, Kept]:
    """Its numbers, and blocks of these: on the host and on the device."""
    if not packed:
        return memory, memory, memory.to(DEVICE)
    made = pack_blocks(memory)
    # memory without the scales: these are read in GPU memory, where they lie too
    scales, bare = scales_of(made, BLOCK, D).clone(), made.clone()
    bare[..., 2 * BLOCK * D :] = 0
    here, there = (PackedBlocks(bare.to(x), BLOCK, D, scales.to(x)) for x in (torch.device("cpu"), DEVICE))
    return unpack_blocks(made, BLOCK, D, torch.float32), here, there


def check(pool: PoolTensors, memory: torch.Tensor, table: torch.Tensor, seq: torch.Tensor) -> None:
    """Books agree with each other and with what lies there."""
    pool = copied(pool, torch.device("cpu"))
    for row, slot in enumerate(seq.tolist()):
        for head in range(KV_HEADS) if slot < len(pool.clock) - 1 else ():
            tokens = pool.token_of[slot, head].long()
            assert (pool.place_of[slot, head, tokens] % COLD).tolist() == list(range(len(tokens)))
            held = pool.gpu[4 * slot : 4 * slot + 4, head].transpose(0, 1).flatten(1, 2)
            off = 0.0
            if pool.packed is not None:
                held, off = torch.stack(pool.packed.rows(slot, head, torch.arange(len(tokens)))), 0.06
            for i in range(2):
                torch.testing.assert_close(held[i], rows_of(memory, table[row], tokens, head, i), atol=off, rtol=1e-5)
            given = pool.free_places[slot, head]
            assert len(set(given[given >= 0].tolist())) == int((given >= 0).sum())
            assert (given[given >= 0] >= pool.pins).all()
            assert (pool.age[slot, head, given[given >= 0].long()] < pool.clock[slot, head] - 1).all()


def check_written(before: PoolTensors, after: PoolTensors, plain: PoolTensors, seq: torch.Tensor) -> bool:
    """Attention has written what it read into places that were cold and not looked up, and nowhere else. Whether there
    were any."""
    written = (after.packed.scales != before.packed.scales).any(2)
    for slot in seq.tolist():
        for head in range(KV_HEADS) if slot < len(before.clock) - 1 else ():
            listed = before.packed.listed[slot, head, : before.packed.count[slot, head]].long()
            assert not written[slot, head, listed].any()
            young = plain.age[slot, head] == plain.clock[slot, head]
            assert not (written[slot, head] & young).any()
            comes = plain.free_places[slot, head, : after.num_attended[slot, head]].long()
            free = comes[~young[comes] & ~torch.isin(comes, listed)]
            assert written[slot, head].nonzero()[:, 0].equal(free.sort().values)
    return bool(written.any())


def look_up(
    q: torch.Tensor,
    pool: PoolTensors,
    seq: torch.Tensor,
    chosen: Chosen,
    pieces: Split,
    where: slice,
    scale: float,
    softcap: float | None,
) -> None:
    """What lies cold, in PyTorch: the kernel has no form for numbers and heads like these."""
    cpu, pieces.lse[:, where], pieces.out[:, where] = torch.device("cpu"), -torch.inf, 0.0
    own = copied(pool, cpu)
    (rows, _, splits, _), look = chosen.count.shape, chosen.look
    count = chosen.count[..., 2].sum(-1).cpu()
    index = torch.zeros(rows, KV_HEADS, max(1, int(count.max())), dtype=torch.int64)
    for row, head in itertools.product(range(rows), range(KV_HEADS)):
        tokens = int(chosen.tokens[row])
        each, found = ceil_div(ceil_div(tokens, look), splits) * look, []
        for split, some in enumerate(chosen.count[row, head, :, 2].tolist()):
            last = min((split + 1) * each, tokens)
            found += chosen.ids[row, head, last - some : last].tolist()
        index[row, head, : len(found)] = torch.tensor(found, dtype=torch.int64)
    places = own.place_of[seq.cpu().long()].gather(2, index).long().clamp_min(0) % COLD
    out, lse = attend_rows(q.cpu(), *pool_rows(own, seq.cpu(), places), count, scale, softcap)
    pieces.out[:, where.start], pieces.lse[:, where.start] = out.to(q.device), lse.to(q.device)


@pytest.mark.parametrize(
    ("planes", "group", "cap", "packed", "small"),
    [(64, 3, None, False, False), (96, 1, 5.0, False, True), (64, 3, None, True, True), (96, 1, 5.0, True, False)],
)
def test_scores_and_what_is_attended(
    planes: int, group: int, cap: float | None, packed: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """small: pools in 8 bits, of which a third is cold."""
    monkeypatch.setattr(attending.pools, "look_up", look_up)
    torch.manual_seed(0)
    rows, blocks, width = 3, 6, 9
    made = sketcher_of(planes)
    words = torch.randint(-(2**31), 2**31 - 1, (blocks, KV_HEADS, BLOCK, planes // WORD), dtype=torch.int32)
    table = torch.randint(0, blocks, (rows, width), dtype=torch.int32)
    tokens = torch.tensor([width * BLOCK, 0, 130], dtype=torch.int32)
    seq = torch.tensor([2, 3, 0], dtype=torch.int32)
    q = torch.randn(rows, KV_HEADS * group, D)
    memory, here, away = kept(torch.randn(blocks, KV_HEADS, 2, BLOCK, D), packed)
    rest = Rest(sums_of(memory, made), made)
    pool = filled_pool(memory, table, seq, 4, width * BLOCK, KV_HEADS * group, small)
    want, want_lse, want_inside, *_ = plain.score_sketch(q, Sketched(words, table, tokens, made, seq), 0.2, cap, pool)()
    there = Sketched(*(x.to(DEVICE) for x in (words, table, tokens)), on(DEVICE, made), seq.to(DEVICE))
    got, lse, inside, *_ = kernel.score_sketch(q.to(DEVICE), there, 0.2, cap, copied(pool, DEVICE))
    hot = pool.hot(seq, width * BLOCK)[:, :, None]
    assert (want.masked_select(hot) == -torch.inf).all()
    real = ((torch.arange(width * BLOCK) < tokens[:, None])[:, None, None] & ~hot).expand_as(want)
    torch.testing.assert_close(got.cpu()[real], want[real], atol=1e-4, rtol=1e-4)
    want_lse = want_lse.logsumexp(1)
    torch.testing.assert_close(lse.logsumexp(1).cpu(), want_lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(inside.logsumexp(1).cpu(), want_inside.logsumexp(1), atol=1e-4, rtol=1e-4)

    # so that a fifth is wanted, nothing, everything
    bound, wrote = want_lse - 3.8, [not small]
    wanted = ((0.0, 0.0, 0.0), (0.0, 0.5, 0.2), (-100.0, 0.0, 0.0)), ((0.0, 0.7, 0.0), (100.0, 0.0, 0.0))
    for shift, now, far in wanted[cap is not None]:
        args = (table, tokens, want, bound + shift, rest, seq, torch.tensor([now, now, now / 2]))
        one, two = (copied(pool, torch.device("cpu")), copied(pool, DEVICE))
        first = plain_attend.attend_scored(q[:, None], here, ScoredEntries(*args, far), one, 0.2, cap)
        there_too = Rest(rest.sums.to(DEVICE), on(DEVICE, made))
        work = ScoredEntries(*(there_too if x is rest else x.to(DEVICE) for x in args), far)
        second = attending.attend_scored(q[:, None].to(DEVICE), away, work, two, 0.2, cap)
        for kind in ("far", "later", "cold"):
            assert getattr(second, kind).sum(2).cpu().equal(getattr(first, kind).sum(2)), kind
        if small:
            wrote.append(check_written(pool, copied(two, torch.device("cpu")), one, seq))
        assert (int(first.later.sum()) > 0) is (now > 0)
        assert (int(first.cold.sum()) > 0) is (small and shift <= 0)
        a, b = first.states.merged(), second.states.merged()
        torch.testing.assert_close(b.out.cpu(), a.out, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(b.lse.cpu(), a.lse, atol=1e-5, rtol=1e-4)
        assert two.age.cpu().equal(one.age)
        assert two.incoming.cpu().equal(one.incoming)
        bring(one, here, table, seq)
        renewing.bring(two, away, table.to(DEVICE), seq.to(DEVICE))
        renew_pool(one, seq)
        (renewing.renew_pool if two.packed is None else renew_pool)(two, seq.to(DEVICE))
        assert two.clock.cpu().equal(one.clock)
        check(one, memory, table, seq)
        check(two, memory, table, seq)
        assert int((one.age == 1).sum()) > 0 or shift > 0
        assert two.place_of.cpu().equal(one.place_of)
        if one.packed is not None and two.packed is not None:
            assert two.packed.scales.cpu().equal(one.packed.scales)
            assert (two.packed.codes.cpu().int() - one.packed.codes.int()).abs().max() <= 1
    assert any(wrote)


def test_full_blocks_are_sketched_and_others_stay() -> None:
    torch.manual_seed(1)
    made = sketcher_of(64)
    gpu = torch.randn(6, KV_HEADS, 2, BLOCK, D)
    block, to = (torch.tensor(x, dtype=torch.int32) for x in ([5, 1, 2], [3, -1, 0]))
    want = torch.full((4, KV_HEADS, BLOCK, 2), 7, dtype=torch.int32)
    got = want.to(DEVICE)
    plain.flush_sketch(gpu, want, block, to, made)
    kernel.flush_sketch(gpu.to(DEVICE), got, *(x.to(DEVICE) for x in (block, to)), on(DEVICE, made))
    assert (want[1:3] == 7).all()
    # a number on the edge of a step may fall to either side
    different = (got.cpu() ^ want).flatten()
    assert sum(int(x).bit_count() if x >= 0 else 32 for x in different.tolist()) <= 4


@pytest.mark.parametrize("d", [32, 24])
def test_how_far_keys_are_from_their_sketch(d: int) -> None:
    keys, ids = torch.randn(5 * BLOCK, KV_HEADS, d), torch.tensor([6, 0, 4, 2, 7], dtype=torch.int32)
    made = fit(spread_of(keys, None), 32)
    kept = torch.randint(-(1 << 31), 1 << 31, (8, KV_HEADS, BLOCK, 1), dtype=torch.int64).int()
    expected = plain.lost(keys, kept, ids, made)
    got = kernel.lost(keys.to(DEVICE), kept.to(DEVICE), ids.to(DEVICE), on(DEVICE, made))
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("count", "hot"), [(64, 48), (32, 4), (0, 8)])
def test_a_pool_is_filled_at_once(small: bool, count: int, hot: int) -> None:
    kv = torch.randn(2, 200, KV_HEADS, D).transpose(1, 2)
    gpu = torch.zeros(4 * 3, KV_HEADS, 2, BLOCK, D)
    pool = PoolTensors.make(gpu, 0, 3, 256, 4 * BLOCK, 4, pins=8, packed=small, hot=hot)
    for x in (pool.place_of, pool.token_of, pool.age, pool.incoming, pool.clock):
        x.random_(0, 50)  # of the sequence before
    chosen = torch.stack([torch.randperm(200)[:count] for _ in range(KV_HEADS)])
    there = copied(pool, DEVICE)
    fill_pool(pool, 1, chosen, *kv)
    filling.fill_pool(there, 1, chosen.to(DEVICE), *kv.to(DEVICE))
    for name, expected, got in zip(vars(pool), vars(pool).values(), vars(copied(there)).values(), strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got, expected, msg=name)
    if small:
        for name, expected in vars(pool.packed).items():
            got = getattr(copied(there).packed, name)
            if name == "codes":  # of what is half a step away
                assert ((got.int() - expected.int()).abs() <= 1).all()
            elif isinstance(expected, torch.Tensor):
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize(("n", "d"), [(300, 32), (90, 24)])
def test_the_highest_weight_of_a_key(n: int, d: int) -> None:
    q, k = torch.randn(40, 4, d), 3 * torch.randn(n, KV_HEADS, d).transpose(0, 1)
    scores = torch.einsum("rhgd,hnd->hrgn", q.view(40, KV_HEADS, 2, d), k) * d**-0.5
    expected = scores.flatten(1, 2).softmax(-1).amax(1)
    torch.testing.assert_close(weights(q, k), expected)
    got = filling.weights(q.to(DEVICE), k.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-4)
