"""`renew`: who leaves and who comes is decided by one program for each sequence and KV head; the copies are many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.renew import Due
from coattn.kernels.triton.packed import halves_of
from coattn.kernels.triton.recall import block_sizes, copy_block

COPIERS = 48
"""Programs that share the copies: enough to have a PCIe link's worth of reads on its way, and so few that other kernels
find room beside them."""


@triton.jit
def _renew(
    gpu_ptr, digests_ptr, host_table_ptr, host_tokens_ptr, window_tokens_ptr, slots_ptr, ids_ptr, flush_ptr, held_ptr,
    chosen_ptr, wanted_ptr, worth_ptr, source_out, place_out, count_out, moved_ptr,
    heads, most, places, first, nobody, interval, shift, host_seq, block_stride, head_stride, digest_stride,
    digest_head, side_stride,
    RECALL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    K_PAD: tl.constexpr, P_PAD: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = seq * heads + head
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    length = tl.load(host_tokens_ptr + seq) + tl.load(window_tokens_ptr + seq)
    p = tl.arange(0, P_PAD)
    mine = held_ptr + (slot * heads + head) * places + p
    held = tl.load(mine, mask=p < places, other=-2)
    if RECALL:
        count = 0
        if (slot != nobody) & ((length + shift) % interval == 0):
            k = tl.arange(0, K_PAD)
            wanted = tl.load(wanted_ptr + row * most + k, mask=k < most, other=float("-inf"))
            worth = tl.load(worth_ptr + row * places + p, mask=p < places, other=float("inf"))
            better = (wanted[None, :] > wanted[:, None]) | (
                (wanted[None, :] == wanted[:, None]) & (k[None, :] < k[:, None])
            )
            worse = (worth[None, :] < worth[:, None]) | ((worth[None, :] == worth[:, None]) & (p[None, :] < p[:, None]))
            # the best of the missed for the place of the worst, and so on
            pair = tl.sum(worse.to(tl.int32), 1)[:, None] == tl.sum(better.to(tl.int32), 1)[None, :]
            offer = tl.max(tl.where(pair, wanted[None, :], float("-inf")), 1)
            take = (offer > worth) & (p < places)
            number = tl.load(chosen_ptr + row * most + k, mask=wanted > float("-inf"), other=0)
            comes = tl.sum(tl.where(pair, number[None, :], 0), 1)
            source = tl.load(host_table_ptr + seq * host_seq + comes, mask=take, other=-1)
            held = tl.where(take, comes, held)
            tl.store(mine, held, mask=take)
            at = row * places + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(source_out + at, source, mask=take)
            tl.store(place_out + at, p, mask=take)
            count = tl.sum(take.to(tl.int32), 0)
            tl.atomic_add(moved_ptr, count.to(tl.int64), sem="relaxed")
        tl.store(count_out + row, count)
    to = tl.load(flush_ptr + seq).to(tl.int64)
    if to >= 0:
        d = tl.arange(0, D_PAD)
        at = tl.arange(0, BLOCK)[:, None] * D + d[None, :]
        inside = (d < D)[None, :]
        here = gpu_ptr + tl.load(ids_ptr + seq).to(tl.int64) * block_stride + head.to(tl.int64) * head_stride
        keys = tl.load(here + at, mask=inside, other=0.0)
        low = tl.min(keys.to(tl.float32), 0)
        high = tl.max(keys.to(tl.float32), 0)
        there = digests_ptr + to * digest_stride + head * digest_head + d
        tl.store(there, low.to(digests_ptr.dtype.element_ty), mask=d < D)
        tl.store(there + side_stride, high.to(digests_ptr.dtype.element_ty), mask=d < D)
        place = tl.min(tl.where(held == -1, p, P_PAD), 0)
        if place < P_PAD:
            tl.store(mine, tl.full([P_PAD], 0, tl.int32) + (length // BLOCK - 1), mask=p == place)
            home = gpu_ptr + (first + slot * places + place) * block_stride + head.to(tl.int64) * head_stride
            tl.store(home + at, keys, mask=inside)
            tl.store(home + BLOCK * D + at, tl.load(here + BLOCK * D + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def _bring(
    gpu_ptr, host_ptr, halves_ptr, source_ptr, place_ptr, count_ptr, slots_ptr, rows, heads, places, first,
    block_stride, head_stride, host_block, host_head,
    PACKED: tl.constexpr, BLOCK: tl.constexpr, R_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        head = (row % heads).to(tl.int64)
        slot = tl.load(slots_ptr + row // heads).to(tl.int64)
        for i in range(tl.load(count_ptr + row)):
            source = tl.load(source_ptr + row * places + i).to(tl.int64)
            place = tl.load(place_ptr + row * places + i)
            away = source * host_block + head * host_head
            home = gpu_ptr + (first + slot * places + place) * block_stride + head * head_stride
            copy_block(host_ptr, halves_ptr, away, home, PACKED, BLOCK, R_PAD, D, D_PAD, SIZE)


def renew(
    gpu: Tensor, host: Tensor, digests: Tensor, rows: Rows, pool: Residents, lists: Lists, due: Due, moved: Tensor
) -> None:
    """See the reference; host may lie in mapped host memory. What comes is decided and copied on the GPU alone."""
    seqs, (_, heads, _, block, d) = len(rows.seq), gpu.shape
    most, places = lists.chosen.shape[-1], pool.held.shape[-1]
    count = seqs * heads
    # what comes from where to which place, and how much of it for each sequence and KV head
    sizes = [count * places, count * places, count] if due.interval else [1, 1, 1]
    source, place, counts = torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=gpu.device), sizes)
    pad = triton.next_power_of_2
    _renew[(seqs, heads)](
        gpu, digests, rows.host_blocks, rows.host_lens, rows.gpu_lens, rows.seq, rows.write_block, rows.flush_to,
        pool.held, lists.chosen, lists.wanted, lists.worth, source, place, counts, moved,
        heads, most, places, pool.first, len(pool.held) - 1, max(1, due.interval), due.shift,
        rows.host_blocks.stride(0), gpu.stride(0), gpu.stride(1), digests.stride(0),
        digests.stride(1), digests.stride(2),
        RECALL=due.interval > 0, BLOCK=block, D=d, D_PAD=pad(d),
        K_PAD=pad(most), P_PAD=pad(places), num_warps=4,
    )  # fmt: skip
    if due.interval:
        _bring[(min(count, COPIERS),)](
            gpu, host, halves_of(host), source, place, counts, rows.seq, count, heads, places, pool.first,
            gpu.stride(0), gpu.stride(1), host.stride(0), host.stride(1), **block_sizes(gpu, host)[1], num_warps=4,
        )  # fmt: skip
