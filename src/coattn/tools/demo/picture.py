"""The demo as one picture: along the document, where each method's KV lies and what of it is attended."""

from __future__ import annotations

from itertools import takewhile
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
FOUND, MISSED = "#00704f", "#b00020"

BAR, STRIP = (-0.16, 0.36), (-0.36, -0.2)
"""Bottom and top, around a method's own height: what is attended, and below it where the KV lies."""
ANSWER = 34
"""Letters of an answer that there is room for."""
COLUMNS = (1.075, 1.2, 1.285)
"""Where the figures and the answer stand, as shares of the bars' width."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG of 1,800 pixels width; readable at 1,200."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, tokens = result["rows"], result["document_tokens"]
    height = 2.17 + 0.62 * len(rows)
    figure, axes = pyplot.subplots(figsize=(12, height))
    figure.subplots_adjust(left=0.115, right=0.635, top=1 - 1.5 / height, bottom=0.56 / height)
    for i, row in enumerate(rows):
        _bar(axes, row, tokens, len(rows) - 1 - i)
    _fact(axes, result, len(rows))
    _names(axes, rows)
    _figures(axes, rows)
    axes.set_xlim(0, tokens)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks([])
    axes.set_xlabel("position in the document, tokens", color=SOFT, fontsize=10)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(colors=SOFT, labelsize=10)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    _titles(figure, result)
    _legend(figure, height)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axes: Axes, row: dict[str, Any], tokens: int, y: float) -> None:
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
    stack(low, high, _placed(row["lies"]))
    axes.plot([0, tokens, tokens, 0, 0], [y + low] * 2 + [y + high] * 2 + [y + low], color=GONE, linewidth=0.6)


def _placed(lies: dict[str, list[float]]) -> list[tuple[list[float], str]]:
    """Where bytes lie in both tiers, the GPU's copy is shown. DRAM fills what codes save."""
    gpu = [min(1.0, share) for share in lies["gpu"]]
    dram = [1.0 - there if held > 0 else 0.0 for there, held in zip(gpu, lies["dram"], strict=True)]
    return [(gpu, LIES["gpu"]), (dram, LIES["dram"])]


def _fact(axes: Axes, result: dict[str, Any], rows: int) -> None:
    middle = (result["fact_start"] + result["fact_end"]) / 2
    axes.plot([middle, middle], [-0.5, rows - 0.5], color=INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.text(middle, rows - 0.46, "the fact", ha="center", va="bottom", fontsize=10.5, fontweight="bold", color=INK)
    end = result["document_tokens"]
    axes.text(end, rows - 0.46, "the question", ha="right", va="bottom", fontsize=10.5, fontweight="bold", color=INK)


def _names(axes: Axes, rows: list[dict[str, Any]]) -> None:
    place: Any = {"transform": axes.get_yaxis_transform(), "ha": "right"}
    for i, row in enumerate(rows):
        y = len(rows) - 1 - i
        axes.text(-0.018, y + 0.02, row["method"], va="bottom", fontsize=12.5, fontweight="bold", color=INK, **place)
        axes.text(-0.018, y - 0.04, "exact" if row["exact"] else "lossy", va="top", fontsize=10, color=SOFT, **place)


def _figures(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Shares and answers, to the right of the bars."""
    first, second, third = COLUMNS
    middle: Any = {"transform": axes.get_yaxis_transform(), "ha": "center"}
    left: Any = {**middle, "ha": "left"}
    top = len(rows) - 0.46
    axes.text(first, top, "KV bytes in\nGPU tier", va="bottom", fontsize=10, color=SOFT, **middle)
    axes.text(second, top, "attended\nper token", va="bottom", fontsize=10, color=SOFT, **middle)
    axes.text(third, top, "answer", va="bottom", fontsize=10, color=SOFT, **left)
    said = remainders([row["answer"] for row in rows])
    for i, row in enumerate(rows):
        y = len(rows) - 1 - i
        axes.text(first, y, percent(row["gpu_share"]), va="center", fontsize=12, color=INK, **middle)
        axes.text(second, y, percent(row["attended"]), va="center", fontsize=12, color=INK, **middle)
        verdict, colour = ("✓ found", FOUND) if row["found"] else ("✗ not found", MISSED)
        axes.text(third, y + 0.02, verdict, va="bottom", fontsize=12, color=colour, fontweight="bold", **left)
        axes.text(third, y - 0.05, shorten(said[i], ANSWER), va="top", fontsize=9, color=SOFT, **left)


def _titles(figure: Figure, result: dict[str, Any]) -> None:
    height, tokens = figure.get_figheight(), result["document_tokens"]
    cap = f"{result['gpu_share']:.1%}".replace(".0%", "%")
    figure.text(
        0.012,
        1 - 0.14 / height,
        f"One fact in {tokens:,} tokens: where each method keeps the KV cache, and what it attends to",
        fontsize=14.5,
        fontweight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.012,
        1 - 0.46 / height,
        f"Planted: “{result['fact']}” Model: {result['model']}. GPU tier: at most {cap} of the KV; no cap for full and "
        "hcattention.",
        fontsize=9.5,
        color=SOFT,
        va="top",
    )


def _legend(figure: Figure, height: float) -> None:
    from matplotlib.patches import Patch

    attended = {
        "by the GPU": SEEN["gpu"],
        "by the CPU, in DRAM": SEEN["cpu"],
        "by the GPU, copied from DRAM": SEEN["pulled"],
    }
    lies = {"in the GPU tier": LIES["gpu"], "in DRAM": LIES["dram"]}
    gone = Patch(facecolor="white", edgecolor=GONE, hatch="//////", linewidth=0, label="nowhere: forgotten")
    for x, title, patches in (
        (0.012, "Tall bar, attended:", [Patch(color=c, label=n) for n, c in attended.items()]),
        (0.58, "Thin bar, lies:", [*(Patch(color=c, label=n) for n, c in lies.items()), gone]),
    ):
        y = 1 - 0.84 / height
        drawn = figure.text(x, y, title, fontsize=9.5, fontweight="bold", color=INK, va="center")
        width = drawn.get_window_extent().width / figure.bbox.width
        figure.legend(
            handles=patches,
            loc="center left",
            bbox_to_anchor=(x + width + 0.014, y),
            ncols=len(patches),
            fontsize=9.5,
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.2,
            columnspacing=0.8,
            handletextpad=0.4,
        )


def percent(share: float) -> str:
    """Whole percents; no rounding to nothing or to everything."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 - 1e-9 else f"{share:.0%}"


def remainders(answers: list[str]) -> list[str]:
    """Answers in one line each, without the words with which all of them begin."""
    lines = [" ".join(answer.split()) for answer in answers]
    words = [line.split() for line in lines]
    same = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False)))
    return [f"… {' '.join(each[same:])}" for each in words] if same else lines


def shorten(line: str, most: int) -> str:
    """At most so many letters, with an ellipsis where it was cut."""
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"
