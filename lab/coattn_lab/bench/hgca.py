"""The figures of the HGCA paper as cases of the decode bench: which rows each needs, and what is drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coattn_lab.bench.decode import Case

BLOCK = 32
"""Tokens per block of every row here."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    batch: Sequence[int]
    context: Sequence[int]
    window: int
    """Tokens that stay on the GPU."""
    kept: tuple[float, ...]
    """Shares of DRAM's entries that heads attend to."""
    peers: tuple[str, ...] = ()


def window(tokens: int) -> dict[str, int]:
    """The window of a tiered method, in blocks."""
    return {"window_blocks": max(1, tokens // BLOCK), "block": BLOCK}


def loading(asked: Asked) -> list[Case]:
    """Figure 6: attention over KV in host memory, loaded to the GPU or attended on the CPU."""
    return [
        Case(method, batch, context, window(BLOCK))
        for batch in asked.batch
        for context in asked.context
        for method in ("offload", "cpu")
    ]


def grid(asked: Asked) -> list[Case]:
    """Figure 10: hybrid attention against loading, by tokens on the GPU and in DRAM; nothing is left out."""
    cases = []
    for batch in asked.batch:
        for gpu in (asked.window // 4, asked.window):
            for host in asked.context:
                for method in ("offload", "cpu"):
                    cases.append(Case(method, batch, gpu + host, window(gpu)))
    return cases


def breakdown(asked: Asked) -> list[Case]:
    """Figure 11: where the time of a layer's attention goes."""
    return [Case("hgca", b, c, window(asked.window), asked.kept) for b in asked.batch for c in asked.context]


def methods(asked: Asked) -> list[Case]:
    """Figure 12: generation by batch size, beside loading, the CPU alone, H2O, InfiniGen and everything on the GPU.

    H2O keeps as many tokens as the window has, half of them by weight.
    """
    cases = []
    for batch in asked.batch:
        for context in asked.context:
            own = window(asked.window)
            cases.append(Case("hgca", batch, context, own, asked.kept))
            cases += [Case(method, batch, context, own) for method in ("offload", "cpu")]
            half = max(1, min(asked.window, context) // 2)
            cases.append(Case("h2o", batch, context, {"heavy": half, "recent": half, "block": BLOCK}))
            cases.append(Case("infinigen", batch, context, {"block": BLOCK}))
            cases.append(Case("full", batch, context, {"block": BLOCK}))
            cases += [Case(peer, batch, context) for peer in asked.peers]
    return cases


def lengths(asked: Asked) -> list[Case]:
    """Figures 13 and 15: time between tokens as a sequence grows, with a fixed window on the GPU."""
    return [
        case
        for batch in asked.batch
        for context in asked.context
        for case in (
            Case("hgca", batch, context, window(asked.window), asked.kept),
            Case("full", batch, context, {"block": BLOCK}),
        )
    ]


FIGURES: dict[str, Callable[[Asked], list[Case]]] = {
    "6": loading,
    "10": grid,
    "11": breakdown,
    "12": methods,
    "13": lengths,
    "15": lengths,
}
"""Figure of the paper -> its cases."""


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows measured under the same conditions: how many times faster each is than `offload` there."""

    def same(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["batch"], row["context"], row["params"].get("window_blocks")

    slow = {same(row): row["ms_per_step"] for row in rows if row["method"] == "offload"}
    return [
        {
            "method": row["method"],
            "batch": row["batch"],
            "context": row["context"],
            "window": (row["params"].get("window_blocks") or 0) * BLOCK,
            "times_offload": slow[same(row)] / row["ms_per_step"],
        }
        for row in rows
        if row["method"] != "offload" and same(row) in slow
    ]
