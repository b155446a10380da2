"""`score_parts` on tensor cores, the digests read where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, available, module
from coattn.kernels.digest import CHUNK, Scores

WARPS = 4


def refuses(q: Tensor, digests: Tensor) -> str | None:
    """Why the kernel cannot take digests `[blocks, kv_heads, 2, d]`, or None."""
    d, group = q.shape[2], q.shape[1] // digests.shape[1]
    if not available(q.device):
        return "kernels cannot be compiled for this device"
    if q.dtype not in (torch.bfloat16, torch.float16) or digests.dtype != q.dtype:
        return f"queries are {q.dtype} and digests {digests.dtype}"
    if d % 32 or d > 128 or group > 8:
        return "heads have no form that fits"
    if q.stride(2) != 1 or digests.stride(3) != 1:
        return "the operands are not contiguous"
    steps = (*q.stride()[:2], *digests.stride()[:3])
    if any(step % 8 for step in steps) or q.data_ptr() % 16 or digests.data_ptr() % 16:
        return "the operands are not aligned"
    return None


def score_parts(
    q: Tensor, digests: Tensor, table: Tensor, tokens: Tensor, block: int, scale: float, softcap: float | None,
    slack: float,
) -> Scores:  # fmt: skip
    """See the reference; blocks that a sequence does not have are neither read nor written."""
    seqs, q_heads, d = q.shape
    kv_heads, m, size = digests.shape[1], table.shape[1], digests.element_size()
    group, chunks = q_heads // kv_heads, -(-m // CHUNK)
    out = torch.empty(seqs, kv_heads, group, m, dtype=torch.float32, device=q.device)
    sums = torch.empty(seqs, kv_heads, group, chunks, dtype=torch.float32, device=q.device)
    constants = {
        "WARPS": WARPS, "D": d, "GROUP": group, "CHUNK": CHUNK, "F16": int(q.dtype == torch.float16),
        "CAP": int(softcap is not None),
    }  # fmt: skip
    module("score_digest.cu", tuple(constants.items()), q.device).launch(
        "score_digest", (-(-chunks // WARPS), kv_heads, seqs), WARPS * 32,
        q, digests, table, tokens, out, sums, float(slack), float(scale), float(softcap or 1.0), m, block, chunks,
        q.stride(0), q.stride(1), Int64(digests.stride(0) * size), Int64(digests.stride(1) * size),
        digests.stride(2) * size, Int64(table.stride(0)),
    )  # fmt: skip
    return Scores(out, sums)
