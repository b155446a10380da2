"""Top-p without sorting, and the entries it keeps in order. `top_p.cu` says how."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, Module, available, module

THREADS, BINS = 512, 2048
TILE = 4 * THREADS
"""Entries that a program looks at at a time."""
PROGRAMS = 1056
"""Programs wanted: eight for each multiprocessor of a large GPU."""
ALL = 2**31 - 1


@dataclass(frozen=True)
class Chosen:
    """Entries that the query heads of a group keep, in GPU memory, as in `types.RowWork`, in order of position.

    weights past the count: anything. others: like lse, over what was left out; -inf where that does not count.
    """

    index: Tensor
    count: Tensor
    weights: Tensor
    lse: Tensor
    others: Tensor


@dataclass
class Work:
    """Bins and maxima that the kernels share from call to call, all zero between calls. One stream at a time."""

    device: torch.device
    _by_rows: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def of(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, lacks and maxima for so many query heads. Made before a step is captured, not in it."""
        if rows not in self._by_rows:
            counts = torch.zeros(rows, BINS, dtype=torch.int32, device=self.device)
            self._by_rows[rows] = (counts, torch.zeros_like(counts, dtype=torch.int64), counts.new_zeros(rows))
        return self._by_rows[rows]


def refuses(device: torch.device, group: int, n: int) -> str | None:
    """Why the kernels cannot take scores of so many query heads a KV head, `n` a row, or None."""
    if not available(device):
        return "kernels cannot be compiled for this device"
    return None if group <= 8 and n % 4 == 0 else f"{group} query heads a KV head, or {n} scores a row"


def chunk_of(n: int, rows: int, most: int) -> int:
    """Entries of a row that one program takes, so that there are enough programs; a multiple of a tile."""
    return min(max(1, n * rows // PROGRAMS // TILE), most // TILE) * TILE


def kernels_of(group: int, device: torch.device) -> Module:
    """The compiled kernels."""
    return module("top_p.cu", (("GROUP", group),), device)


def largest(scores: Tensor, tokens: Tensor, top: Tensor) -> None:
    """The largest of each row of scores, into zeros `top`, as integers of the same order."""
    seqs, kv_heads, group, n = scores.shape
    chunk = chunk_of(n, seqs * kv_heads * group, 1 << 17)
    grid = (-(-n // chunk), kv_heads * group, seqs)
    kernels_of(group, scores.device).launch("largest", grid, THREADS, scores, tokens, top, grid[1], Int64(n), chunk)


def top_p(
    scores: Tensor,
    tokens: Tensor,
    gpu_lse: Tensor | None,
    tau: float,
    cap: int | None,
    tail: int,
    most: int,
    work: Work,
    together: bool = False,
) -> Chosen:
    """scores `[seqs, kv_heads, group, n]` of which the first `tokens` `[seqs]` count -> what is kept, at most `most`.

    gpu_lse: `[seqs, pieces, q_heads]` lse of what is attended anyway, in pieces. most: a multiple of 4. The work holds
    the scores' maxima. tail: what is left out counts as zero (0), not at all (1), or somebody else sees to it (2): for
    0 lse is over everything, else over what is kept; for 0 and 2 `others` says how much was left. together: a head has
    weights for all that any head of its group keeps. No synchronisation.
    """
    seqs, kv_heads, group, n = scores.shape
    q_heads, device = kv_heads * group, scores.device
    counts, lacks, top = work.of(seqs * q_heads)
    # a bin of a program holds fewer than 2**17 entries without an overflow
    wide, chunk = chunk_of(n, seqs * q_heads, 1 << 17), chunk_of(n, seqs * kv_heads, 1 << 13)
    chunks = -(-n // chunk)
    rows = torch.empty(3, seqs, q_heads, dtype=torch.float32, device=device)
    places = torch.empty(2, seqs, q_heads, dtype=torch.int32, device=device)
    edges = torch.empty(seqs, q_heads, chunks, dtype=torch.int32, device=device)
    kept = torch.empty(seqs, kv_heads, chunks, dtype=torch.int32, device=device)
    flags = torch.empty(seqs, kv_heads, n // 4, dtype=torch.int32, device=device)
    index = torch.empty(seqs, kv_heads, most, dtype=torch.int32, device=device)
    count = torch.empty(seqs, kv_heads, dtype=torch.int32, device=device)
    weights = torch.empty(seqs, q_heads, most, dtype=torch.float32, device=device)
    kernels = kernels_of(group, device)
    by_head, by_list, long = (chunks, q_heads, seqs), (chunks, kv_heads, seqs), Int64(n)
    grid = (-(-n // wide), q_heads, seqs)
    kernels.launch("histogram", grid, THREADS, scores, tokens, top, counts, lacks, q_heads, long, wide)
    (high, lse, others), (bins, limit) = rows, places
    kernels.launch(
        "threshold", (q_heads, seqs, 1), 256, counts, lacks, top, tokens, gpu_lse,
        0 if gpu_lse is None else gpu_lse.shape[1],
        float(tau), ALL if cap is None else cap, tail, int(together), q_heads, high, bins, limit, lse, others,
    )  # fmt: skip
    if cap is not None:
        kernels.launch("edge", by_head, THREADS, scores, tokens, high, bins, limit, edges, q_heads, long, chunks, chunk)
    kernels.launch(
        "count", by_list, THREADS, scores, tokens, high, bins, limit, edges, kept, flags, kv_heads, long, chunks, chunk
    )
    norms = high if together and tail else lse
    sums = torch.empty(seqs, q_heads, chunks if together else 0, dtype=torch.float32, device=device)
    kernels.launch(
        "choose", by_list, THREADS, scores, tokens, flags, kept, norms, index, weights, count, kv_heads, long, chunks,
        chunk, most, int(together), sums,
    )  # fmt: skip
    if together:
        kernels.launch(
            "settle", (16, kv_heads, seqs), 256, sums, norms, tokens, count, weights, lse, others, tail,
            kv_heads, chunks, chunk, most,
        )  # fmt: skip
    return Chosen(index, count, weights, lse, others)


def send(
    index: Tensor, weights: Tensor, count: Tensor, index_there: Tensor, weights_there: Tensor, count_there: Tensor
) -> None:
    """Copies what is kept, and no more, to mapped host memory: for more sequences perhaps, else of the same shapes."""
    seqs, kv_heads, most = index.shape
    kernels_of(weights.shape[1] // kv_heads, index.device).launch(
        "send", (16, kv_heads, seqs), 256,
        index, weights, count, index_there, weights_there, count_there, kv_heads, most,
    )  # fmt: skip
