"""Attention over pools in 8 bits on a GPU, beside that over the window's blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.attend_pool import has_form
from coattn.ops.cuda.nvrtc import Int64, available, module
from coattn.ops.triton.launch import follow, part
from coattn.quantise.rows import TILE, PackedRows
from coattn.state import Split
from coattn.types import BlockList, LayerShape

WARPS = 4
"""Of a program."""
RESIDENT = 2
"""Programs of a multiprocessor at a time: three would fit, and leave no room for the scan of sketches beside them."""
ROUNDS = 4
"""Of programs at most, where pools are so many that one round would leave multiprocessors idle."""
LEAST = 2
"""Tiles of a warp."""
WINDOW = 64
"""Tokens of the window for a program: one of 192 took longer than 16,384 tokens of a pool take all programs."""


def refuses(shape: LayerShape) -> str | None:
    """Why pools of such a layer cannot be in 8 bits, or None."""
    if not available(shape.device):
        return "kernels cannot be compiled for this device"
    return None if has_form(shape) else "heads or numbers have no form that fits"


def splits_of(pairs: int, places: int, slots: int) -> int:
    """How many pieces each pool is cut into: those that keep the most of so many slots at work in all rounds."""
    rounds = 1 if 2 * pairs <= slots else ROUNDS
    most = max(1, min(places // (TILE * WARPS * LEAST), rounds * slots // pairs, 64))
    return max(range(1, most + 1), key=lambda count: pairs * count / (-(-pairs * count // slots) * slots))


def attend_pool(
    q: Tensor,
    blocks: Tensor,
    picked: BlockList,
    rows: PackedRows,
    seq: Tensor,
    scale: float,
    softcap: float | None,
) -> Split:
    """See `ops/attend_pool.py`."""
    (seqs, _, q_heads, d), kv_heads = q.shape, blocks.shape[1]
    processors = part() or torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = splits_of(seqs * kv_heads, rows.places, processors * RESIDENT)
    near = -(-picked.longest // WINDOW)
    out = torch.empty(seqs, splits + near, q_heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(seqs, splits + near, q_heads, dtype=torch.float32, device=q.device)
    form = {
        "WARPS": WARPS, "GROUP": q_heads // kv_heads, "D": d, "BLOCK": blocks.shape[3],
        "F16": int(q.dtype == torch.float16), "CAP": int(softcap is not None),
    }  # fmt: skip
    module("attend_pool.cu", tuple(form.items()), q.device).launch(
        "attend_pool", (splits + near, kv_heads, seqs), WARPS * 32, q, rows.codes, rows.scales, rows.middle,
        rows.spread, seq, rows.count, blocks, picked.table, picked.tokens, out, lse, float(scale),
        float(softcap or 1.0), rows.places, splits, Int64(q.stride(0)), Int64(q.stride(2)), Int64(blocks.stride(0)),
        Int64(blocks.stride(1)), Int64(blocks.stride(2)), Int64(picked.table.stride(0)), follow=follow(),
    )  # fmt: skip
    return Split(out, lse)
