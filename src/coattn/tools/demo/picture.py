"""The demo as one picture: along the document, where each method's KV lies and what of it is attended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# after Okabe and Ito: colour-blind people tell them apart
SEEN = {"gpu": "#0072b2", "cpu": "#d55e00", "pulled": "#7b4fa3"}
LIES = {"gpu": "#8cc0e3", "dram": "#f0c36d"}
EMPTY, GONE = "#f3f3f3", "#9a9a9a"
INK, SOFT = "#222222", "#5f5f5f"
VERDICTS = {True: ("✓ found", "#00704f"), False: ("✗ not found", "#b00020")}

BAR, STRIP = (-0.16, 0.36), (-0.36, -0.2)
"""Bottom and top, around a method's own height: what is attended, and below it where the KV lies."""
COLUMNS = (
    (1.07, "KV bytes in\nGPU tier", "center"),
    (1.19, "attended\nper token", "center"),
    (1.26, "answer", "left"),
)
"""Where the figures and the verdict stand, as shares of the bars' width."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG of 1,800 pixels width; readable at 1,200."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, tokens = result["rows"], result["document_tokens"]
    height, top = 2.17 + 0.62 * len(rows), len(rows) - 0.46
    figure, axes = pyplot.subplots(figsize=(12, height))
    figure.subplots_adjust(left=0.115, right=0.715, top=1 - 1.5 / height, bottom=0.56 / height)
    for y, row in zip(range(len(rows))[::-1], rows, strict=True):
        _bars(axes, row, tokens, y)
        _words(axes, row, y)
    for x, title, align in COLUMNS:
        _text(axes, x, top, title, ha=align, va="bottom")
    fact = (result["fact_start"] + result["fact_end"]) / 2 / tokens
    axes.plot([fact * tokens] * 2, [-0.5, len(rows) - 0.5], color=INK, linewidth=1, linestyle=(0, (4, 2)))
    for x, what, align in ((fact, "the fact", "center"), (1, "the question", "right")):
        _text(axes, x, top, what, 10.5, INK, ha=align, va="bottom", fontweight="bold")
    axes.set_xlim(0, tokens)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks([])
    axes.set_xlabel("position in the document, tokens", color=SOFT, fontsize=10)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(colors=SOFT, labelsize=10)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    title = f"One fact in {tokens:,} tokens: where each method keeps the KV cache, and what it attends to"
    figure.text(0.012, 1 - 0.14 / height, title, fontsize=14.5, fontweight="bold", color=INK, va="top")
    cap = f"{result['gpu_share']:.1%}".replace(".0%", "%")
    cap = f"GPU tier: at most {cap} of the KV; no cap for full."
    planted = f"Planted: “{result['fact']}” Model: {result['model']}. {cap}"
    figure.text(0.012, 1 - 0.46 / height, planted, fontsize=9.5, color=SOFT, va="top")
    _legend(figure, 1 - 0.84 / height)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axes: Axes, row: dict[str, Any], tokens: int, y: float) -> None:
    """Heights within a bar are shares: of the steps, layers and heads that attend; of the bytes that lie there."""
    count = len(row["lies"]["gpu"])
    edges = [tokens * i / count for i in range(count + 1)]

    def stack(low: float, high: float, parts: list[tuple[list[float], str]]) -> None:
        base = [0.0] * count
        for shares, colour in parts:
            top = [min(1.0, b + share) for b, share in zip(base, shares, strict=True)]
            under, over = ([y + low + (high - low) * x for x in (*side, side[-1])] for side in (base, top))
            axes.fill_between(edges, under, over, step="post", color=colour, linewidth=0)
            base = top

    low, high = BAR
    axes.fill_between([0, tokens], y + low, y + high, color=EMPTY, linewidth=0)
    stack(low, high, [(row["seen"][how], colour) for how, colour in SEEN.items()])
    low, high = STRIP
    axes.fill_between([0, tokens], y + low, y + high, facecolor="white", edgecolor=GONE, hatch="//////", linewidth=0)
    # what lies in both tiers is shown in the GPU's; DRAM fills what codes save
    gpu = [min(1.0, share) for share in row["lies"]["gpu"]]
    dram = [1.0 - there if held > 0 else 0.0 for there, held in zip(gpu, row["lies"]["dram"], strict=True)]
    stack(low, high, [(gpu, LIES["gpu"]), (dram, LIES["dram"])])
    axes.plot([0, tokens, tokens, 0, 0], [y + low] * 2 + [y + high] * 2 + [y + low], color=GONE, linewidth=0.6)


def _words(axes: Axes, row: dict[str, Any], y: float) -> None:
    """The method to the left of its bars; shares and the verdict to the right."""
    _text(axes, -0.018, y + 0.02, row["method"], 12.5, INK, ha="right", va="bottom", fontweight="bold")
    _text(axes, -0.018, y - 0.04, "exact" if row["exact"] else "lossy", ha="right", va="top")
    first, second, third = (x for x, _, _ in COLUMNS)
    _text(axes, first, y, percent(row["gpu_share"]), 12, INK, va="center")
    _text(axes, second, y, percent(row["attended"]), 12, INK, va="center")
    verdict, colour = VERDICTS[row["found"]]
    _text(axes, third, y, verdict, 12, colour, ha="left", va="center", fontweight="bold")


def _text(axes: Axes, x: float, y: float, text: str, size: float = 10, colour: str = SOFT, **how: Any) -> None:
    """x: share of the bars' width. y: rows from below."""
    how = {"ha": "center", **how}
    axes.text(x, y, text, fontsize=size, color=colour, transform=axes.get_yaxis_transform(), **how)


def _legend(figure: Figure, y: float) -> None:
    """Each legend begins where its title ends."""
    from matplotlib.patches import Patch

    attended = {"by the GPU": "gpu", "by the CPU, in DRAM": "cpu", "by the GPU, copied from DRAM": "pulled"}
    lies = {"in the GPU tier": "gpu", "in DRAM": "dram"}
    gone = Patch(facecolor="white", edgecolor=GONE, hatch="//////", linewidth=0, label="nowhere: forgotten")
    for x, title, patches in (
        (0.012, "Tall bar, attended:", [Patch(color=SEEN[how], label=name) for name, how in attended.items()]),
        (0.58, "Thin bar, lies:", [*(Patch(color=LIES[tier], label=name) for name, tier in lies.items()), gone]),
    ):
        drawn = figure.text(x, y, title, fontsize=9.5, fontweight="bold", color=INK, va="center")
        end = x + drawn.get_window_extent().width / figure.bbox.width
        place: Any = {"loc": "center left", "bbox_to_anchor": (end + 0.014, y), "borderpad": 0, "borderaxespad": 0}
        spacing: Any = {"handlelength": 1.2, "columnspacing": 0.8, "handletextpad": 0.4}
        figure.legend(handles=patches, ncols=len(patches), fontsize=9.5, frameon=False, **place, **spacing)


def percent(share: float) -> str:
    """Whole percents; no rounding to nothing or to everything."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 - 1e-9 else f"{share:.0%}"
