"""The CPU kernels: KV bytes per second, beside what memory gives and beside PyTorch on the same work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional

from coattn import native
from coattn.kernels.quantise.blocks import pack_blocks
from coattn.kernels.quantise.values import pack_values, row_bytes
from coattn.native import Values
from coattn_lab.bench import core_limits
from coattn_lab.bench.timing import in_turn, median_seconds

BLOCK = 32
KV_HEADS = 8
SEQS = 4
TILE = 64
"""Blocks of random numbers that are written over and over to fill the memory."""
LINE = 64
"""Bytes of a cache line."""
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One row to be."""

    kernel: str
    isa: str
    dtype: str
    group: int
    head_size: int
    threads: int


@dataclass(frozen=True)
class Row(Case):
    """One measured row. GB are 10^9 bytes; `gbps` counts the bytes of keys and values read."""

    gbps: float
    limit_gbps: float
    """Only reading, with the same threads: the best of all runs, where `gbps` is the median.

    `attend`: the very memory it reads, in its order, before every call. `weighted_sum`: memory of its own, pieces of
    its size at random, three times right before and right after.
    """
    share: float
    """Of the limit. `attend`: the median over pairs of a call and the reading right before it, since what memory gives
    changes within a second where a machine is shared."""
    torch_gbps: float | None
    """PyTorch on the same work; for int8 on the same tokens in bfloat16, in bytes of bfloat16."""
    tokens_per_s: float
    torch_tokens_per_s: float | None
    error: float | None
    """Relative error of the output (L2) against float32 attention over the numbers before rounding to dtype."""


class Work:
    """KV of one dtype and head size, in random order, with what is needed to check results."""

    def __init__(self, element: str, head_size: int, nbytes: int) -> None:
        self.element, self.head_size = element, head_size
        self.piece = native.block_layout(element, BLOCK, head_size, keys=element != "int4").bytes
        self.blocks_per_seq = max(TILE, nbytes // (KV_HEADS * self.piece * SEQS) // TILE * TILE)
        count = self.blocks_per_seq * SEQS
        generator = torch.Generator().manual_seed(0)
        size = (TILE * BLOCK, KV_HEADS, head_size)
        # a few strong channels, as keys have: rounding keys without them would look too easy
        strength = torch.ones(KV_HEADS, head_size)
        strength[:, :: head_size // 4] = 4.0
        self.k, self.v = (torch.randn(size, generator=generator) for _ in range(2))
        self.k *= strength
        self.order = torch.randperm(count, generator=generator)
        self.table = self.order.int().view(SEQS, 1, self.blocks_per_seq)
        self.tokens = torch.full((SEQS, 1), self.blocks_per_seq * BLOCK, dtype=torch.int32)

    @cached_property
    def blocks(self) -> native.Blocks:
        """Keys and values."""
        both = torch.stack([_blocks(self.k), _blocks(self.v)], 2)
        packed = pack_blocks(both) if self.element == "int8" else both.to(TORCH[self.element]).view(torch.uint8)
        return native.Blocks(self._repeat(packed.flatten(1)), self.element, BLOCK, KV_HEADS, self.head_size)

    @cached_property
    def values(self) -> Values:
        """Values alone."""
        rows, dtype = _blocks(self.v), TORCH.get(self.element)
        packed = pack_values(rows, self.element) if dtype is None else rows.to(dtype).view(torch.uint8).flatten(2)
        memory = self._repeat(packed.flatten(1)).view(-1, KV_HEADS, packed.shape[2])
        if dtype is not None:
            memory = memory.view(dtype).view(-1, KV_HEADS, BLOCK, self.head_size)
        return Values(memory, self.element, BLOCK, KV_HEADS, self.head_size)

    def _repeat(self, tile: Tensor) -> Tensor:
        """Memory `[blocks, bytes]`, in random order, out of a tile's blocks `[TILE, bytes]`, over and over."""
        nbytes = len(self.order) * tile.shape[1]
        arena = native.Arena(nbytes)
        arena.grow(nbytes)
        memory = arena.memory()[:nbytes].view(-1, tile.shape[1])
        for start in range(0, len(self.order), TILE):
            memory[self.order[start : start + TILE]] = tile
        return memory

    @property
    def kv_bytes(self) -> int:
        return self.blocks_per_seq * SEQS * KV_HEADS * self.piece

    @property
    def total_tokens(self) -> int:
        return self.blocks_per_seq * SEQS * BLOCK

    def query(self, group: int) -> Tensor:
        """`[seqs, q_heads, head_size]`, in the dtype a model would have."""
        generator = torch.Generator().manual_seed(group)
        dtype = TORCH.get(self.element, torch.bfloat16)
        return torch.randn(SEQS, KV_HEADS * group, self.head_size, generator=generator).to(dtype)

    def error(self, q: Tensor, out: Tensor) -> float:
        """Every sequence repeats the same tile, so attention over the tile in float32 is the exact result."""
        keys, values = (x.transpose(0, 1).repeat_interleave(q.shape[1] // KV_HEADS, 0) for x in (self.k, self.v))
        exact = functional.scaled_dot_product_attention(q.float().transpose(0, 1), keys, values).transpose(0, 1)
        return float(((out - exact).norm() / exact.norm()).item())

    def torch_call(self, q: Tensor) -> Callable[[], object]:
        """PyTorch's own attention over as many tokens, contiguous, as it likes them."""
        dtype = TORCH.get(self.element, torch.bfloat16)
        length = self.blocks_per_seq * BLOCK
        repeats = length // (TILE * BLOCK)
        keys, values = (
            x.to(dtype).transpose(0, 1).repeat(1, repeats, 1).expand(SEQS, -1, -1, -1).contiguous()
            for x in (self.k, self.v)
        )
        queries = q.to(dtype)[:, :, None]

        def call() -> Tensor:
            return functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=q.shape[1] != KV_HEADS)

        return call


def run(cases: list[Case], nbytes: int, seconds: float, with_torch: bool) -> Iterator[Row]:
    """Measures case after case; the cases of one dtype and head size share their memory."""
    shared: dict[tuple[str, int], Work] = {}
    peers: dict[tuple[str, int, int, int, str], float] = {}
    for case in cases:
        key = (case.dtype, case.head_size)
        if key not in shared:
            shared.clear()
            shared[key] = Work(case.dtype, case.head_size, nbytes)
        work = shared[key]
        native.set_threads(case.threads)
        try:
            native.force_isa(case.isa)
            timed = KERNELS[case.kernel](work, case.group)
            measure = _with_reading_rate if case.kernel == "attend" else _between_readings
            taken, limit, share = measure(case, timed, work, seconds)
        finally:
            native.force_isa(None)
            native.set_threads(0)
        peer = None
        if with_torch and timed.peer is not None:
            name = (case.dtype, case.head_size, case.group, case.threads, case.kernel)
            if name not in peers:
                peers[name] = _torch_seconds(timed.peer, case.threads, seconds)
            peer = peers[name]
        yield Row(
            **asdict(case),
            gbps=timed.nbytes / taken / 1e9,
            limit_gbps=limit,
            share=share,
            torch_gbps=None if peer is None else timed.peer_bytes / peer / 1e9,
            tokens_per_s=timed.tokens / taken,
            torch_tokens_per_s=None if peer is None else timed.tokens / peer,
            error=timed.error,
        )


def _with_reading_rate(case: Case, timed: Timed, work: Work, seconds: float) -> tuple[float, float, float]:
    """Seconds of a call, GB/s of only reading, the share of that."""

    def reading() -> float:
        return core_limits.gather_gbps(work.blocks, work.table, case.threads, repeats=1)

    pairs = in_turn(timed.call, reading, seconds)
    shares = [timed.nbytes / taken / 1e9 / limit for taken, limit in pairs]
    taken = statistics.median(taken for taken, _ in pairs)
    return taken, max(limit for _, limit in pairs), statistics.median(shares)


def _between_readings(case: Case, timed: Timed, work: Work, seconds: float) -> tuple[float, float, float]:
    def reading() -> float:
        return core_limits.random_gather_gbps(case.threads, timed.piece, work.kv_bytes, repeats=3)

    before, taken = reading(), median_seconds(timed.call, seconds)
    limit = max(before, reading())
    return taken, limit, timed.nbytes / taken / 1e9 / limit


@dataclass(frozen=True)
class Timed:
    """What one kernel does in one call."""

    call: Callable[[], object]
    nbytes: int
    """Bytes it must read."""
    piece: int
    """Contiguous bytes it reads at a time, in whole cache lines."""
    tokens: int
    peer: Callable[[], object] | None
    """The same in PyTorch."""
    peer_bytes: int
    error: float | None


def attend(work: Work, group: int) -> Timed:
    """Attention over every token, blocks in random order."""
    q = work.query(group)
    plan = native.plan_attend(q, work.blocks, work.table, work.tokens)
    peer_bytes = 2 * work.total_tokens * KV_HEADS * work.head_size * TORCH.get(work.element, torch.bfloat16).itemsize
    error = work.error(q, plan.run().out)
    return Timed(plan.run, work.kv_bytes, work.piece, work.total_tokens, _lazy(work, q), peer_bytes, error)


def weighted_sum(work: Work, group: int) -> Timed:
    """Values of every eighth token, chosen per head."""
    length = work.blocks_per_seq * BLOCK
    chosen = length // 8
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(length, generator=generator)[:chosen] for _ in range(SEQS * KV_HEADS)])
    index = index.sort(-1).values.int().view(SEQS, KV_HEADS, chosen)
    count = torch.full((SEQS, KV_HEADS), chosen, dtype=torch.int32)
    weights = torch.rand(SEQS, KV_HEADS * group, chosen, generator=generator)
    plan = native.plan_weighted_sum(weights, index, count, work.values, work.table)
    dtype = TORCH.get(work.element)
    row = row_bytes(work.element, work.head_size) if dtype is None else work.head_size * dtype.itemsize
    return Timed(plan.run, SEQS * KV_HEADS * chosen * row, -(-row // LINE) * LINE, SEQS * chosen, None, 0, None)


KERNELS: dict[str, Callable[[Work, int], Timed]] = {"attend": attend, "weighted_sum": weighted_sum}
DTYPES: dict[str, tuple[str, ...]] = {"attend": (*TORCH, "int8"), "weighted_sum": (*TORCH, "int8", "int4")}
"""What each of them takes."""


def _blocks(rows: Tensor) -> Tensor:
    """`[tokens, kv_heads, d]` -> `[blocks, kv_heads, block, d]`."""
    return rows.view(-1, BLOCK, *rows.shape[1:]).transpose(1, 2).contiguous()


@cache
def streaming_limit(threads: int, nbytes: int) -> float:
    """GB/s of reading memory front to back."""
    return core_limits.stream_read_gbps(threads, nbytes)


def _lazy(work: Work, q: Tensor) -> Callable[[], object]:
    """Builds PyTorch's inputs at the first call: they are as large as the work itself."""
    made: list[Callable[[], object]] = []

    def call() -> object:
        if not made:
            made.append(work.torch_call(q))
        return made[0]()

    return call


def _torch_seconds(call: Callable[[], object], threads: int, seconds: float) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return median_seconds(call, seconds)
    finally:
        torch.set_num_threads(before)
