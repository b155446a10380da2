"""`attend_scored` on a GPU: entries are chosen, then fetched out of mapped memory and attended."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.cuda import attend_pool as pools
from coattn.kernels.cuda import score_sketch as cuda
from coattn.kernels.pool_memory import COLD, FRESH, PoolTensors
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.quantise.sketch import Scan
from coattn.kernels.scored_entries import MANY, Chosen, Lanes, ScoredEntries, Taken, splits_of
from coattn.kernels.streams import SideStream
from coattn.kernels.triton.packed import Entries, read_entries
from coattn.kernels.triton.rest import rest_value
from coattn.kernels.triton.softcap import capped
from coattn.kernels.triton.token_pool import Home, place_for, put_rows
from coattn.state import Split

LOOK = 256
"""Scores that are looked at at a time."""
ROWS = 16
"""Entries that are fetched at a time."""
SOME = 256
"""Of those that come into the pool, listed at a time."""
REGISTERS = {False: 128, True: 168}
"""Of a thread that fetches, at most, of rows as they are, and of those in 8 bits or of more than 128 channels, so that
four or three programs of a multiprocessor run at a time. Compilers differ: without a limit one took 220."""
PARTS, NEAR = 4, 3
"""Programs of each of MANY pairs that fetch, and that look up, 64 tokens at a time. A multiprocessor has room for two
to four of them, and those that find nothing to do take it too."""
FEW_NEAR = 8
"""Programs of each of fewer pairs that look up."""


@triton.jit
def _choose(
    tokens_ptr, scores_ptr, bound_ptr, ids_ptr, later_ptr, tail_ptr, count_ptr, seq_ptr, place_ptr, age_ptr, clock_ptr,
    now_ptr, far, kv_heads, n, splits, most, places, score_head, score_group, score_token,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, LOOK: tl.constexpr, FRESH: tl.constexpr, COLD: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    count = tl.load(tokens_ptr + row)
    each = tl.cdiv(tl.cdiv(count, LOOK), splits) * LOOK
    first = split * each
    last = tl.minimum(first + each, count)
    g, x = tl.arange(0, GROUP_PAD), tl.arange(0, LOOK)
    real = g < GROUP
    own = row * kv_heads + head
    bound = tl.load(bound_ptr + own * GROUP + g, mask=real, other=float("inf"))
    ids_ptr += own * n
    later_ptr += (own * splits + split) * FRESH
    pool = tl.load(seq_ptr + row).to(tl.int64) * kv_heads + head
    place_ptr += pool * most
    clock = tl.load(clock_ptr + pool)
    now = tl.load(now_ptr + row)
    far = tl.minimum(far, now)
    found = 0
    coming = 0
    near = 0
    tail_top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    tail_sum = tl.zeros([GROUP_PAD], tl.float32)
    for start in range(first, last, LOOK):
        token = start + x
        seen = token < last
        at = scores_ptr + own * score_head + g[:, None] * score_group + token[None, :] * score_token
        scores = tl.load(at, mask=real[:, None] & seen[None, :], other=float("-inf")).to(tl.float32)
        margin = tl.max(tl.where(real[:, None], scores - bound[:, None], float("-inf")), 0)
        held = tl.load(place_ptr + token, mask=seen, other=0).to(tl.int32)
        inside = held >= 0
        wanted = (margin >= 0) & seen
        cold = wanted & inside
        # what is looked up is young, and cold no more
        tl.store(place_ptr + token, (held % COLD).to(tl.int16), mask=cold)
        tl.store(age_ptr + pool * places + held % COLD, tl.zeros([LOOK], tl.int32) + clock, mask=cold)
        place = near + tl.cumsum(cold.to(tl.int32), 0) - 1
        tl.store(ids_ptr + last - 1 - place, token, mask=cold)
        near += tl.sum(cold.to(tl.int32), 0)
        at_once = (margin >= now) & wanted & ~inside
        place = tl.cumsum(at_once.to(tl.int32), 0) - 1
        tl.store(ids_ptr + first + found + place, token, mask=at_once)
        found += tl.sum(at_once.to(tl.int32), 0)
        later = (margin >= far) & wanted & ~inside & ~at_once
        place = coming + tl.cumsum(later.to(tl.int32), 0) - 1
        tl.store(later_ptr + place, token, mask=later & (place < FRESH))
        coming += tl.sum(later.to(tl.int32), 0)
        rest = tl.where((at_once | cold)[None, :], float("-inf"), scores)
        higher = tl.maximum(tail_top, tl.max(rest, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        tail_sum = tail_sum * tl.exp(tail_top - shift) + tl.sum(tl.exp(rest - shift[:, None]), 1)
        tail_top = higher
    some = tail_sum > 0
    tail = tl.where(some, tail_top + tl.log(tl.where(some, tail_sum, 1.0)), float("-inf"))
    tl.store(tail_ptr + (row * splits + split) * kv_heads * GROUP + head * GROUP + g, tail, mask=real)
    count_ptr += (own * splits + split) * 3
    tl.store(count_ptr, found)
    tl.store(count_ptr + 1, tl.minimum(coming, FRESH))
    tl.store(count_ptr + 2, near)


@triton.jit
def _numbered(f, there, counts, s):
    """Of entries of these numbers in all pieces together, where they are `there`: the piece, and the number in it."""
    which = tl.sum((tl.cumsum(counts, 0)[None, :] <= f[:, None]).to(tl.int32), 1)
    before = tl.sum(tl.where(s[None, :] < which[:, None], counts[None, :], 0), 1)
    return tl.where(there, which, 0), tl.where(there, f - before, 0)


@triton.jit
def _list(
    tokens_ptr, ids_ptr, later_ptr, count_ptr, seq_ptr, free_ptr, incoming_ptr, num_incoming_ptr, num_attended_ptr,
    kv_heads, n, splits,
    FRESH: tl.constexpr, SOME: tl.constexpr, SPLITS_PAD: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Which tokens come into the places that are to be given: those attended first, in the order of their splits."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    each = tl.cdiv(tl.cdiv(tl.load(tokens_ptr + row), LOOK), splits) * LOOK
    slot = tl.load(seq_ptr + row).to(tl.int64)
    own, pool = row * kv_heads + head, slot * kv_heads + head
    s = tl.arange(0, SPLITS_PAD)
    counts = count_ptr + (own * splits + s) * 3
    here = tl.load(counts, mask=s < splits, other=0)
    more = tl.load(counts + 1, mask=s < splits, other=0)
    total = tl.sum(here, 0)
    end = tl.minimum(total + tl.sum(more, 0), FRESH)
    came = 0
    for start in range(0, end, SOME):
        f = start + tl.arange(0, SOME)
        first = f < total
        which, number = _numbered(f, first, here, s)
        token = tl.load(ids_ptr + own * n + which.to(tl.int64) * each + number, mask=first, other=-1)
        second = (f >= total) & (f < end)
        which, number = _numbered(f - total, second, more, s)
        at = later_ptr + (own * splits + which) * FRESH + number
        token = tl.where(second, tl.load(at, mask=second, other=-1), token)
        place = tl.load(free_ptr + pool * FRESH + f)
        token = tl.where(place >= 0, token, -1)
        came += tl.sum((token >= 0).to(tl.int32), 0)
        tl.store(incoming_ptr + pool * FRESH + f, token)
    tl.store(num_incoming_ptr + pool, came)
    tl.store(num_attended_ptr + pool, total)


@triton.jit
def _fetch(
    q_ptr, memory_ptr, scale_ptr, table_ptr, tokens_ptr, ids_ptr, count_ptr, tail_ptr, out_ptr, lse_ptr,
    gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr, places, packed_places, first_block, gpu_block, gpu_head,
    seq_ptr, free_ptr, age_ptr, since_ptr, scale, softcap, kv_heads, n, splits, parts, pieces, q_seq, q_head,
    block_stride, head_stride, scale_block, scale_head, table_seq, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    LOOK: tl.constexpr, ROWS: tl.constexpr, SPLITS_PAD: tl.constexpr, IN_8_BITS: tl.constexpr, FRESH: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is read is also written into places of a pool in 8 bits that nobody reads.

    Entries of a KV head are few, and most pieces have none of them. So programs take them in turns, ROWS at a time,
    whatever piece they are of.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    each = tl.cdiv(tl.cdiv(tl.load(tokens_ptr + row), LOOK), splits) * LOOK
    g, d, r = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, ROWS)
    real, inside = g < GROUP, d < D
    own = row * kv_heads + head
    ids_ptr += own * n
    s = tl.arange(0, SPLITS_PAD)
    counts = tl.load(count_ptr + (own * splits + s) * 3, mask=s < splits, other=0)
    q_at = q_ptr + row * q_seq + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & inside[None, :], other=0.0)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    if IN_8_BITS:
        slot = tl.load(seq_ptr + row).to(tl.int64)
        since = tl.load(since_ptr + slot * kv_heads + head)
    found = tl.sum(counts, 0)
    for start in range(part * ROWS, found, parts * ROWS):
        used = start + r < found
        which, number = _numbered(start + r, used, counts, s)
        token = tl.load(ids_ptr + which * each + number, mask=used, other=0)
        ids = tl.load(table_ptr + row * table_seq + token // BLOCK, mask=used, other=0).to(tl.int64)
        k, v = read_entries(
            memory_ptr, scale_ptr, ids * block_stride + head * head_stride, ids * scale_block + head * scale_head,
            token % BLOCK, used, PACKED, gpu_ptr.dtype.element_ty, BLOCK, D, D_PAD,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAP:
            scores = capped(scores, softcap)
        scores = tl.where(used[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        top, total = higher, total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        if IN_8_BITS:
            pool = slot * kv_heads + head
            to, free = place_for(start + r, used, pool, free_ptr, age_ptr, since, places, FRESH)
            put_rows(
                k, v, to, free, slot, head, kv_heads, gpu_ptr, codes_ptr, scales_ptr, middle_ptr, spread_ptr,
                places, packed_places, first_block, gpu_block, gpu_head, IN_8_BITS, BLOCK, D, D_PAD,
            )  # fmt: skip
    heads = kv_heads * GROUP
    to = (row * (pieces + 1) + part) * heads + head * GROUP + g
    some = total > 0
    tl.store(lse_ptr + to, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=real)
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(out_ptr + to[:, None] * D + d[None, :], acc, mask=real[:, None] & inside[None, :])
    if part == 0:
        # what all weigh that were left out
        at = tail_ptr + (row * splits + s[:, None]) * heads + head * GROUP + g[None, :]
        tail = tl.load(at, mask=(s < splits)[:, None] & real[None, :], other=float("-inf"))
        high = tl.max(tail, 0)
        shift = tl.where(high == float("-inf"), 0.0, high)
        rest = high + tl.log(tl.sum(tl.exp(tail - shift[None, :]), 0))
        to = (row * (pieces + 1) + pieces) * heads + head * GROUP + g
        tl.store(lse_ptr + to, tl.where(high == float("-inf"), high, rest), mask=real)


def _chosen(work: ScoredEntries, pool: PoolTensors) -> tuple[Chosen, Tensor]:
    """Entries, and what all others of each piece weigh, `[rows, splits, q_heads]`."""
    (rows, kv_heads, group, n), device = work.scores.shape, work.seq.device
    splits = splits_of(rows * kv_heads)
    tail = torch.empty(rows, splits, kv_heads * group, dtype=torch.float32, device=device)
    count = torch.empty(rows, kv_heads, splits, 3, dtype=torch.int32, device=device)
    ids = torch.empty(rows, kv_heads, n, dtype=torch.int32, device=device)
    later = torch.empty(rows, kv_heads, splits, FRESH, dtype=torch.int32, device=device)
    scores = work.scores
    chosen = Chosen(ids, later, count, work.tokens, scores.chunk if isinstance(scores, Scan) else LOOK)
    if isinstance(scores, Scan):
        cuda.choose_scored(work, pool, chosen, tail)
        return chosen, tail
    _choose[(rows, kv_heads, splits)](
        work.tokens, scores, work.bound, ids, later, tail, count, work.seq, pool.place_of, pool.age, pool.clock,
        work.sync_fetch, work.fetch, kv_heads, n, splits, pool.place_of.shape[-1], pool.age.shape[-1], scores.stride(1),
        scores.stride(2), scores.stride(3),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), LOOK=LOOK, FRESH=FRESH,
        COLD=COLD, num_warps=4,
    )  # fmt: skip
    return chosen, tail


def _listed(work: ScoredEntries, pool: PoolTensors, chosen: Chosen) -> None:
    """The pool's books say what comes."""
    rows, kv_heads, _, n = work.scores.shape
    _list[(rows, kv_heads)](
        work.tokens, chosen.ids, chosen.later, chosen.count, work.seq, pool.free_places, pool.incoming,
        pool.num_incoming, pool.num_attended,
        kv_heads, n, chosen.count.shape[2],
        FRESH=FRESH, SOME=SOME, SPLITS_PAD=triton.next_power_of_2(chosen.count.shape[2]), LOOK=chosen.look, num_warps=4,
    )  # fmt: skip


def attend_scored(
    q: Tensor,
    memory: Tensor | PackedBlocks,
    work: ScoredEntries,
    pool: PoolTensors,
    scale: float,
    softcap: float | None,
    lanes: Lanes | None = None,
) -> Taken:
    """See `kernels/attend_scored.py`."""
    rows, _, q_heads, d = q.shape
    (kv_heads, _, n), away = work.scores.shape[1:], Entries.of(memory)
    (chosen, tail), group = _chosen(work, pool), q_heads // kv_heads
    splits, home, many = chosen.count.shape[2], Home.of(pool), rows * kv_heads > MANY
    parts = PARTS if many else splits
    pieces = parts if pool.packed is None else parts + (NEAR if many else FEW_NEAR)
    out = torch.empty(rows, pieces + 1, q_heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, pieces + 1, q_heads, dtype=torch.float32, device=q.device)

    def fetch() -> None:
        _fetch[(rows, kv_heads, parts)](
            q, away.memory, away.scales, work.table, work.tokens, chosen.ids, chosen.count, tail, out, lse,
            *home.tensors, *home.sizes, work.seq, pool.free_places, pool.age, home.since, scale, softcap or 1.0,
            kv_heads,
            n, splits, parts, pieces, q.stride(0), q.stride(2), *away.strides, work.table.stride(0), GROUP=group,
            GROUP_PAD=max(16, triton.next_power_of_2(group)), LOOK=chosen.look, ROWS=ROWS,
            SPLITS_PAD=triton.next_power_of_2(splits), **home.forms, FRESH=FRESH, **away.sizes, CAP=softcap is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
            maxnreg=REGISTERS[away.sizes["PACKED"] or d > 128],
        )  # fmt: skip

    def others() -> None:
        rest_value(q[:, 0], work.rest, work.bound, work.sync_fetch, work.seq, scale, softcap, out[:, pieces])
        _listed(work, pool, chosen)

    # what crosses PCIe takes longest, so it comes first
    far, books = lanes or (SideStream(), SideStream())
    far.run(q.device, fetch)
    books.run(q.device, others)
    if pool.packed is not None:
        pools.look_up(q, pool, work.seq, chosen, Split(out, lse), slice(parts, pieces), scale, softcap)
    far.join()
    books.join()
    return Taken(Split(out, lse), chosen.count[..., 0], chosen.count[..., 1], chosen.count[..., 2])
