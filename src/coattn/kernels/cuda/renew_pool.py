"""`renew_pool` on a GPU: one program for a sequence and KV head."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.cuda.nvrtc import module
from coattn.kernels.pool_memory import COLD, FRESH, PoolTensors
from coattn.units import ceil_div

THREADS = 256
"""Of a program; fewer where a pool has few places."""


def constants(places: int) -> dict[str, int]:
    """Of the kernel's form, for pools of so many places."""
    threads = min(THREADS, ceil_div(places, 64) * 32)
    return {"THREADS": threads, "EACH": 2 * ceil_div(places, 2 * threads), "FRESH": FRESH, "COLD": COLD}


def renew_pool(pool: PoolTensors, seq: Tensor) -> None:
    """See `kernels/token_pool.py`."""
    (slots, heads), places, rows = pool.clock.shape, pool.age.shape[-1], pool.packed
    form = constants(places)
    lists = (None, None, None) if rows is None else (rows.listed, rows.count, rows.since)
    row, hot = (0, 0) if rows is None else (rows.places, max(0, rows.hot - pool.pins))
    module("renew_pool.cu", tuple(form.items()), seq.device).launch(
        "renew_pool", (heads, len(seq), 1), form["THREADS"],
        pool.token_of, pool.age, pool.free_places, pool.incoming, pool.clock, pool.num_incoming, pool.place_of,
        *lists, pool.evict_age, seq,
        pool.place_of.shape[-1], row, places, slots - 1, pool.pins, hot,
    )  # fmt: skip
