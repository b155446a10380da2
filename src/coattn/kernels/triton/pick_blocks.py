"""`pick_blocks`: one program for each sequence and KV head; the lowest picked score is found by narrowing a range."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coattn.kernels.digest import Scores
from coattn.kernels.lists import Lists, Residents, Rows

LEAST = tl.constexpr(-2147483648)
MOST = tl.constexpr(2147483647)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _values(
    scores_ptr, sums_ptr, row, there, n, blocks, chunks,
    GROUP: tl.constexpr, CHUNKS_PAD: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    """float32 [N_PAD]: the log of the sum of the group's softmaxes, block by block."""
    best = tl.full([N_PAD], float("-inf"), tl.float32)
    total = tl.zeros([N_PAD], tl.float32)
    c = tl.arange(0, CHUNKS_PAD)
    for g in tl.static_range(GROUP):
        at = row * GROUP + g
        part = tl.load(sums_ptr + at * chunks + c, mask=c < chunks, other=float("-inf"))
        top = tl.max(part, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        whole = top + tl.log(tl.sum(tl.exp(part - top), 0))
        x = tl.load(scores_ptr + at * blocks + n, mask=there, other=float("-inf")) - whole
        higher = tl.maximum(best, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(best - shift) + tl.exp(x - shift)
        best = higher
    return best + tl.log(total)


@triton.jit
def _pick_blocks(
    scores_ptr, sums_ptr, host_ptr, host_tokens_ptr, window_ptr, window_tokens_ptr, slots_ptr, held_ptr,
    gpu_out, gpu_tokens_out, host_out, host_tokens_out, chosen_out, wanted_out, worth_out, values_out,
    heads, blocks, chunks, most, places, ring, width, first, sinks, host_seq, window_seq,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
    N_PAD: tl.constexpr, CHUNKS_PAD: tl.constexpr, K_PAD: tl.constexpr, P_PAD: tl.constexpr, R_PAD: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = seq * heads + tl.program_id(1)
    n = tl.arange(0, N_PAD)
    full = tl.load(host_tokens_ptr + seq) // BLOCK
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    p = tl.arange(0, P_PAD)
    held = tl.load(held_ptr + (slot * heads + tl.program_id(1)) * places + p, mask=p < places, other=-2)
    there = n < full
    value = _values(scores_ptr, sums_ptr, row, there, n, blocks, chunks, GROUP, CHUNKS_PAD, N_PAD)
    value = tl.where(n < sinks, HIGHEST, value)
    # whole numbers in the order of the scores: the bits of a float, those of negative ones turned round
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ MOST, bits)
    count = tl.minimum(full, most)
    low = tl.min(tl.where(there, key, MOST), 0).to(tl.int64)
    high = tl.max(tl.where(there, key, LEAST), 0).to(tl.int64) + 1
    found = full
    # at least `count` keys are `low` or more, fewer are `high` or more; three borders are tried with one sum
    while (found > count) & (high - low > 1):
        quarter = (high - low) // 4
        a, b = low + quarter, low + (high - low) // 2
        c = tl.maximum(b, high - tl.maximum(quarter, 1))
        sums = (there & (key >= a.to(tl.int32))).to(tl.int64)
        sums += (there & (key >= b.to(tl.int32))).to(tl.int64) << 20
        sums += (there & (key >= c.to(tl.int32))).to(tl.int64) << 40
        above = tl.sum(sums, 0)
        over_a, over_b, over_c = above & 0xFFFFF, (above >> 20) & 0xFFFFF, above >> 40
        if over_c >= count:
            low = c
            found = over_c.to(tl.int32)
        elif over_b >= count:
            low = b
            high = c
            found = over_b.to(tl.int32)
        elif over_a >= count:
            low = a
            high = b
            found = over_a.to(tl.int32)
        else:
            high = a
    bar = low.to(tl.int32)
    taken = there & (key >= bar)
    if found > count:
        tie = taken & (key == bar)
        kept = tl.sum(tie.to(tl.int32), 0) - (found - count)
        taken = taken & ((key > bar) | (tl.cumsum(tie.to(tl.int32), 0) <= kept))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen_out + row * most + place, n, mask=taken)
    tl.store(values_out + row * blocks + n, value, mask=there)
    tl.debug_barrier()

    k = tl.arange(0, K_PAD)
    counted = k < count
    number = tl.load(chosen_out + row * most + k, mask=counted, other=-1)
    match = (number[:, None] == held[None, :]) & counted[:, None]
    resident = tl.max(match.to(tl.int32), 1)
    missing = counted & (resident == 0)
    ids = tl.load(host_ptr + seq * host_seq + number, mask=missing, other=0)
    tl.store(host_out + row * most + tl.cumsum(missing.to(tl.int32), 0) - 1, ids, mask=missing)
    tl.store(host_tokens_out + row, tl.sum(missing.to(tl.int32), 0) * BLOCK)
    present = (held >= 0) & (held < full)
    homes = (first + slot * places + p).to(tl.int32)
    tl.store(gpu_out + row * width + tl.cumsum(present.to(tl.int32), 0) - 1, homes, mask=present)
    residents = tl.sum(present.to(tl.int32), 0)
    r = tl.arange(0, R_PAD)
    recent = tl.load(window_tokens_ptr + seq)
    used = (r < ring) & (r * BLOCK < recent)
    newest = tl.load(window_ptr + seq * window_seq + r, mask=used, other=0)
    tl.store(gpu_out + row * width + residents + r, newest, mask=used)
    tl.store(gpu_tokens_out + row, residents * BLOCK + recent)
    score = tl.load(values_out + row * blocks + number, mask=missing, other=float("-inf"))
    tl.store(wanted_out + row * most + k, score, mask=k < most)
    worth = tl.load(values_out + row * blocks + held, mask=present, other=float("-inf"))
    worth = tl.where(tl.max(match.to(tl.int32), 0) > 0, float("inf"), worth)
    tl.store(worth_out + row * places + p, worth, mask=p < places)


def pick_blocks(scores: Scores, rows: Rows, pool: Residents, lists: Lists) -> None:
    """See the reference. `lists.host` may lie in mapped host memory; only what is missing is written there."""
    seqs, heads, group, blocks = scores.blocks.shape
    chunks, most = scores.sums.shape[-1], lists.chosen.shape[-1]
    places, ring = pool.held.shape[-1], rows.gpu_blocks.shape[1]
    values = torch.empty(seqs * heads * blocks, dtype=torch.float32, device=scores.blocks.device)
    pad = triton.next_power_of_2
    warps = max(4, min(32, pad(blocks) // 256))  # about eight blocks each thread
    _pick_blocks[(seqs, heads)](
        scores.blocks, scores.sums, rows.host_blocks, rows.host_lens, rows.gpu_blocks, rows.gpu_lens, rows.seq,
        pool.held, lists.gpu, lists.gpu_lens, lists.host, lists.host_lens, lists.chosen, lists.wanted, lists.worth,
        values,
        heads, blocks, chunks, most, places, ring, lists.gpu.shape[-1], pool.first, pool.sinks,
        rows.host_blocks.stride(0), rows.gpu_blocks.stride(0),
        GROUP=group, BLOCK=pool.block, N_PAD=pad(blocks),
        CHUNKS_PAD=pad(chunks), K_PAD=pad(most), P_PAD=pad(places), R_PAD=pad(ring), num_warps=warps,
    )  # fmt: skip
