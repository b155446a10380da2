"""What a decode step would take: its bytes over the rates of memory and PCIe. A bound from below, not a measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coattn.auto.maintenance import pool_tokens
from coattn.kernels.quantise.rows import HOT, PackedRows, has_form
from coattn.method.row import Composed
from coattn.types import LayerShape

CHOSEN = ((1e-3, 186), (3e-4, 690), (1e-4, 1780), (3e-5, 3780))
"""By floor: entries that `auto` read per KV head at 15,872 tokens of essays (docs/log/auto.md); 1,840 of 30,000 at
1e-4: with the length they hardly grow."""
FETCHED = 0.0075
"""Of the entries that `auto` wants in a step, how many cross PCIe: 23, 5 and 13 of 1,840 on three texts of 30,720
tokens, with a pool of half of them (docs/methods/auto.md). A smaller one fetches more."""
LATE = 0.65
"""Of the time that these take to cross, what a step grows by: 50 ns for a row that it waits for and 7 for another,
where a row takes 20 and 2 of 14 are waited for (docs/log/auto.md)."""
SCAN = 0.7
"""Of the rate of GPU memory, what a scan of sketches reaches beside what else runs (docs/methods/auto.md)."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second. As measured on an NVIDIA H200: HBM read; rows of one token gathered over PCIe by a kernel."""

    hbm: float = 4.2e12
    pcie: float = 25e9


def entries(floor: float, context: int) -> float:
    """How many a KV head reads in DRAM, in between those that were measured, and beyond as the nearest two say."""
    if floor <= 0:
        return float(context)
    found = CHOSEN[-1]
    (f0, n0), (f1, n1) = next((p for p in pairwise(CHOSEN) if floor >= p[1][0]), (CHOSEN[-2], found))
    slope = math.log(n1 / n0) / math.log(f1 / f0)
    return min(float(context), 1 / floor, n0 * math.pow(floor / f0, slope))


def step(
    layers: Sequence[LayerShape], composed: Composed, batch: int, context: int, weights: int, rates: Rates
) -> dict[str, Any] | None:
    """Bytes and milliseconds of a decode step of `full` or `auto`; None for others.

    weights: bytes that a step reads of them in GPU memory.
    """
    parts = composed.build()
    whole = [shape for shape in layers if shape.sliding_window is None]
    windows = batch * sum(
        s.token_bytes * min(context, s.sliding_window) for s in layers if s.sliding_window is not None
    )
    if composed.method.name == "full":
        kv = windows + batch * context * sum(shape.token_bytes for shape in whole)
        return _step(batch, rates, weights=weights, kv=kv)
    if composed.method.name != "auto":
        return None
    index: Any = parts.index
    select: Any = parts.select
    config: Any = parts.config
    maintenance: Any = parts.maintenance
    near = min(context, config.window_blocks * config.block)
    scan = batch * max(0, context - near) * sum(s.kv_heads * index.planes(s) // 8 for s in whole)
    small = maintenance.pool_dtype != "model" and not select.is_exact() and all(map(has_form, whole))
    pool = pool_tokens(context, maintenance.pool_share, "int8" if small else "model")
    row = [PackedRows.token_bytes(s.kv_heads, s.head_dim) if small else s.token_bytes for s in whole]
    pools = batch * (min(pool, maintenance.hot or HOT) if small else pool) * sum(row)
    chosen = entries(select.floor, max(0, context - near))
    # codes alone cross, a byte a channel: their scales lie in GPU memory
    row = [shape.token_bytes // (shape.dtype.itemsize if config.host_dtype == "int8" else 1) for shape in whole]
    pulled = batch * chosen * FETCHED * sum(row)
    kv = windows + pools + batch * near * sum(shape.token_bytes for shape in whole)
    return {**_step(batch, rates, weights=weights, kv=kv, scan=scan, pulled=round(pulled)), "entries": round(chosen)}


def _step(batch: int, rates: Rates, weights: int, kv: int, scan: int = 0, pulled: int = 0) -> dict[str, Any]:
    own = (weights + kv) / rates.hbm + scan / (SCAN * rates.hbm)
    # most of what is not waited for comes beside the layers
    seconds = max(own + LATE * pulled / rates.pcie, pulled / rates.pcie)
    return {
        "weight_bytes": weights,
        "kv_bytes": kv,
        "scan_bytes": scan,
        "pulled_bytes": pulled,
        "ms": 1e3 * seconds,
        "tokens_per_s": batch / seconds,
    }
