"""`score_pq` on tensor cores, the codebook in shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.card import shared_memory
from coattn.kernels.cuda.nvrtc import Int64, available, module
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.triton.launch import follow

PER = 2
"""Programs that are on a multiprocessor at a time."""
SHARED = 100 << 10
"""Bytes of a codebook at most, so that two fit on an H200; GeForce cards let a program have 99 KiB."""


def refuses(q: Tensor, kept: Tensor, book: Codebook, bits: int) -> str | None:
    """Why the kernel cannot take codes `[blocks, kv_heads, block, width]`, or None."""
    count, width = book.centroids.shape[1:]
    group = q.shape[1] // kept.shape[1]
    row = book.groups * bits // 8
    if not available(q.device):
        return "kernels cannot be compiled for this device"
    if q.dtype not in (torch.bfloat16, torch.float16) or book.centroids.dtype != q.dtype:
        return f"queries are {q.dtype} and centroids {book.centroids.dtype}"
    most = min(SHARED, shared_memory(q.device))
    if width not in (2, 4) or book.groups % 16 or count * width * 2 > most or count % 8:
        return "the codebook has no form that fits"
    if kept.shape[2] % 16 or group > 8 or row % 4 or (bits == 16 and row % (16 if book.groups % 32 == 0 else 8)):
        return "blocks, heads or rows of codes have no form that fits"
    return None


def threads_of(groups: int, tokens: int) -> int:
    """What was fastest on an H200: few threads where rows are long (registers), or so few that the start counts."""
    return 384 if groups >= 64 or tokens <= 65536 else 512


def score_pq(
    q: Tensor, kept: Tensor, table: Tensor, tokens: Tensor, book: Codebook, bits: int, scale: float,
    softcap: float | None, top: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See the reference; scores past a sequence's end are not written.

    top: `[seqs, q_heads]` int32 of zeros, where the largest score of each head is left, as an integer of its order.
    """
    (seqs, q_heads, _), (_, kv_heads, block, _) = q.shape, kept.shape
    group, n, size = q_heads // kv_heads, table.shape[1] * kept.shape[2], kept.element_size()
    out = torch.empty(seqs, kv_heads, group, n, dtype=torch.float32, device=q.device)
    if top is None:
        top = torch.zeros(seqs, q_heads, dtype=torch.int32, device=q.device)
    _, count, width = book.centroids.shape
    threads = threads_of(book.groups, seqs * n)
    constants = {
        "THREADS": threads, "BITS": bits, "GROUPS": book.groups, "WIDTH": width, "GROUP": group,
        "BLOCK": block, "COUNT": count,
        "F16": int(q.dtype == torch.float16), "CAP": int(softcap is not None),
    }  # fmt: skip
    kernels = module("score_pq.cu", tuple(constants.items()), q.device)
    room = PER * torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(max(1, room // (seqs * kv_heads)), -(-n // 256))
    kernels.launch(
        "score_pq", (programs, kv_heads, seqs), threads,
        q, kept, book.centroids, table, tokens, out, top, scale, softcap or 1.0,
        q.stride(0), q.stride(1), kept.stride(0) * size, kept.stride(1) * size, table.stride(0), Int64(n), kv_heads,
        shared=book.centroids.nbytes, follow=seqs == 1 and follow(),
    )  # fmt: skip
    return out
