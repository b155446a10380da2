"""The demo as one picture: along the document, where each method's KV lies and what of it is attended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind people tell apart; pale ones say where KV lies, full ones what is attended
LIES = {"gpu": "#a9cfe8", "dram": "#f6dfb0"}
SEEN = {"gpu": "#0072b2", "pulled": "#7b4fa3", "cpu": "#d55e00"}
GONE = "#d9d9d9"
INK, SOFT = "#222222", "#666666"
FOUND, MISSED = "#00704f", "#b00020"

LEGEND = (
    ("lies in the GPU tier", LIES["gpu"], ""),
    ("lies in DRAM", LIES["dram"], ""),
    ("forgotten", "white", "////"),
    ("attended by the GPU", SEEN["gpu"], ""),
    ("copied to the GPU, attended there", SEEN["pulled"], ""),
    ("attended by the CPU, in DRAM", SEEN["cpu"], ""),
)
HEIGHT = 0.62
"""Of a method's bar, where the distance between two is 1."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG of 1,800 pixels width; readable at 1,200."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(12, 1.9 + 0.62 * len(rows)))
    figure.subplots_adjust(left=0.125, right=0.64, top=1 - 1.12 / figure.get_figheight(), bottom=0.125)
    tokens = result["document_tokens"]
    for i, row in enumerate(rows):
        _bar(axes, row, tokens, len(rows) - 1 - i)
    _fact(axes, result, len(rows))
    _columns(axes, rows)
    axes.set_xlim(0, tokens)
    axes.set_ylim(-0.5, len(rows) - 0.38)
    axes.set_yticks([])
    axes.set_xlabel(f"position in the document, {tokens:,} tokens", color=SOFT, fontsize=10)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(colors=SOFT, labelsize=10)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    figure.text(
        0.012,
        0.972,
        f"One fact in {tokens:,} tokens: where each method keeps the KV cache, and what it looks at to answer",
        fontsize=14,
        fontweight="bold",
        color=INK,
        va="top",
    )
    _legend(figure)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axes: Axes, row: dict[str, Any], tokens: int, y: float) -> None:
    """Height within the bar is a share: of the bytes that lie there, and of heads and layers that attend."""
    lies, seen = row["lies"], row["seen"]
    count = len(lies["gpu"])
    edges = [tokens * i / count for i in range(count + 1)]
    low, top = y - HEIGHT / 2, y + HEIGHT / 2
    axes.fill_between([0, tokens], low, top, facecolor="white", edgecolor=GONE, hatch="////", linewidth=0)
    both = [g + d for g, d in zip(lies["gpu"], lies["dram"], strict=True)]
    kept = [low + HEIGHT * min(1.0, 1.0 if d and g + d >= 0.5 else b) for g, d, b in zip(*lies.values(), both, strict=True)]
    _area(axes, edges, [low] * count, kept, LIES["dram"])
    _area(axes, edges, [low] * count, [low + HEIGHT * min(1.0, g) for g in lies["gpu"]], LIES["gpu"])
    base = [low] * count
    for how, colour in SEEN.items():
        above = [b + HEIGHT * share for b, share in zip(base, seen[how], strict=True)]
        _area(axes, edges, base, above, colour)
        base = above
    axes.plot([0, tokens, tokens, 0, 0], [low, low, top, top, low], color=SOFT, linewidth=0.6)


def _area(axes: Axes, edges: list[float], low: list[float], high: list[float], colour: str) -> None:
    axes.fill_between(edges, [*low, low[-1]], [*high, high[-1]], step="post", color=colour, linewidth=0)


def _fact(axes: Axes, result: dict[str, Any], rows: int) -> None:
    middle = (result["fact_start"] + result["fact_end"]) / 2
    axes.plot([middle, middle], [-0.42, rows - 0.42], color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
    axes.text(middle, rows - 0.36, "the fact", ha="center", va="bottom", fontsize=10.5, fontweight="bold", color=INK)
    axes.text(
        result["document_tokens"], rows - 0.36, "the question", ha="right", va="bottom", fontsize=10.5, color=INK
    )


def _columns(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Names to the left, figures and answers to the right of the bars."""
    place = axes.get_yaxis_transform()
    places = {"KV on\nthe GPU": 1.065, "attended\nper token": 1.175, "answer": 1.245}
    for title, x in places.items():
        left = title == "answer"
        axes.text(
            x, len(rows) - 0.36, title, transform=place, ha="left" if left else "center", va="bottom", fontsize=10.5,
            color=SOFT,
        )
    for i, row in enumerate(rows):
        y = len(rows) - 1 - i
        axes.text(-0.02, y + 0.02, row["method"], transform=place, ha="right", va="bottom", fontsize=12.5, color=INK,
                  fontweight="bold")
        axes.text(-0.02, y - 0.04, "exact" if row["exact"] else "lossy", transform=place, ha="right", va="top",
                  fontsize=10, color=SOFT)
        for x, share in ((1.065, row["gpu_share"]), (1.175, row["attended"])):
            axes.text(x, y, percent(share), transform=place, ha="center", va="center", fontsize=12, color=INK)
        axes.text(1.245, y + 0.02, "✓ found" if row["found"] else "✗ not found", transform=place, ha="left", va="bottom",
                  fontsize=12, color=FOUND if row["found"] else MISSED, fontweight="bold")
        axes.text(1.245, y - 0.04, shorten(row["answer"], 44), transform=place, ha="left", va="top", fontsize=8.5,
                  color=SOFT)


def percent(share: float) -> str:
    """Whole percents; no rounding to nothing or to everything."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 - 1e-9 else f"{share:.0%}"


def shorten(text: str, most: int) -> str:
    """One line, with an ellipsis where it was cut."""
    line = " ".join(text.split())
    return f"“{line}”" if len(line) <= most else f"“{line[: most - 1]}…”"


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, edgecolor=GONE if hatch else colour, hatch=hatch, label=label)
        for label, colour, hatch in LEGEND
    ]
    height = 1 - 0.42 / figure.get_figheight()
    figure.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(0.005, height),
        ncols=6,
        fontsize=9.5,
        frameon=False,
        handlelength=1.3,
        handleheight=1.0,
        columnspacing=1.3,
        handletextpad=0.5,
    )
