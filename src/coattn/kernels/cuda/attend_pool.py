"""Attention over pools in 8 bits on a GPU, beside that over the window's blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import Int64, available, module
from coattn.kernels.pool_memory import COLD, PIECES, PoolTensors
from coattn.kernels.quantise.rows import TILE, formless
from coattn.kernels.scored_entries import Chosen
from coattn.state import Split
from coattn.types import BlockList, LayerShape
from coattn.units import ceil_div

WARPS = 4
MOST_HEADS = 8
"""Query heads of a program: columns of a product."""
RESIDENT = 3
"""Programs of a multiprocessor at a time; one less with more than 128 channels, whose rows fill its registers."""
ROUNDS = 4
"""Of programs at most."""
EACH = 1024
"""Tokens of a program, about, where one round would be more: what is waited for beside them finds room soon."""
LEAST = 2
"""Tiles of a warp."""
WINDOW = 64
"""Tokens of the window for a program: one of 192 took longer than 16,384 tokens of a pool take all programs. Half
as many with more than 128 channels."""


def refuses(shape: LayerShape) -> str | None:
    """Why pools of such a layer cannot be in 8 bits, or None."""
    if not available(shape.device):
        return "kernels cannot be compiled for this device"
    return formless(shape)


def splits_of(pairs: int, places: int, slots: int) -> int:
    """How many pieces each pool is cut into: those that keep the most of so many slots at work in all rounds."""
    rounds = max(1, min(ROUNDS, pairs * places // (slots * EACH))) if 2 * pairs <= slots else ROUNDS
    most = max(1, min(places // (TILE * WARPS * LEAST), rounds * slots // pairs, PIECES))
    return max(range(1, most + 1), key=lambda count: pairs * count / (-(-pairs * count // slots) * slots))


def share_of(group: int) -> int:
    """Programs that share a KV head of so many query heads, each with as many of them."""
    return next(count for count in range(1, group + 1) if group % count == 0 and group // count <= MOST_HEADS)


def constants(q: Tensor, blocks: Tensor, softcap: float | None) -> dict[str, int]:
    """Of the kernels' form."""
    group, d = q.shape[2] // blocks.shape[1], q.shape[3]
    share = share_of(group)
    return {
        "WARPS": WARPS, "GROUP": group // share, "SHARE": share, "D": d, "BLOCK": blocks.shape[3],
        "F16": int(q.dtype == torch.float16), "CAP": int(softcap is not None),
        "WINDOW": WINDOW if d <= 128 else WINDOW // 2, "PIECES": PIECES, "COLD": COLD,
    }  # fmt: skip


def attend_near(
    q: Tensor, blocks: Tensor, picked: BlockList, pool: PoolTensors, seq: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Callable[[], Split]]:
    """See `kernels/attend_pool.py`."""
    rows = pool.packed
    assert rows is not None
    (seqs, _, q_heads, d), form = q.shape, constants(q, blocks, softcap)
    heads = blocks.shape[1] * form["SHARE"]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    slots = processors * (RESIDENT if d <= 128 else RESIDENT - 1)
    splits = splits_of(seqs * heads, min(rows.hot, rows.places), slots)
    near = ceil_div(picked.longest, form["WINDOW"])
    pieces = near + splits
    out = torch.empty(seqs, pieces, q_heads, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(seqs, pieces, q_heads, dtype=torch.float32, device=q.device)
    made, how = module("attend_pool.cu", tuple(form.items()), q.device), (float(scale), float(softcap or 1.0))
    strides = Int64(q.stride(0)), Int64(q.stride(2))
    made.launch(
        "attend_near", (near, heads, seqs), WARPS * 32, q, blocks, picked.table, picked.tokens, out, lse, *how,
        pieces, *strides, Int64(blocks.stride(0)), Int64(blocks.stride(1)), Int64(blocks.stride(2)),
        Int64(picked.table.stride(0)),
    )  # fmt: skip

    def pools() -> Split:
        made.launch(
            "attend_pool", (splits, heads, seqs), WARPS * 32, q, rows.codes, rows.scales, rows.middle, rows.spread,
            rows.listed, rows.count, seq, out, lse, pool.true_lse, *how, rows.places, pieces, *strides,
        )  # fmt: skip
        return Split(out, lse)

    return lse[:, :near], pools


def look_up(
    q: Tensor,
    pool: PoolTensors,
    seq: Tensor,
    chosen: Chosen,
    pieces: Split,
    where: slice,
    scale: float,
    softcap: float | None,
) -> None:
    """q `[rows, 1, q_heads, d]` over what was chosen though it lies cold in the pools of sequences `seq`, in 8 bits:
    into pieces `where`, a program each."""
    (_, kv_heads, splits, _), rows = chosen.count.shape, pool.packed
    assert rows is not None
    form = constants(q, pool.gpu, softcap)
    module("attend_pool.cu", tuple(form.items()), q.device).launch(
        "look_up", (where.stop - where.start, kv_heads * form["SHARE"], len(seq)), WARPS * 32,
        q, rows.codes, rows.scales, rows.middle, rows.spread, pool.place_of, chosen.ids, chosen.count, chosen.tokens,
        seq, pieces.out, pieces.lse, float(scale), float(softcap or 1.0), rows.places, pieces.out.shape[1], where.start,
        pool.place_of.shape[-1],
        chosen.ids.shape[-1], splits, chosen.look, Int64(q.stride(0)), Int64(q.stride(2)),
    )  # fmt: skip
