"""Quality against GPU bytes as an SVG: one curve a method, both axes logarithmic. Needs no other package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

Point = tuple[float, float]
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 430, 78, 24, 150, 56
COLOURS = ("#0b6e99", "#c4472b", "#2f8f4e", "#8a4fbf", "#b8860b", "#444444", "#d1548f", "#009688", "#6b7a1e", "#7f5539")
STYLE = "font-family='sans-serif' font-size='13' fill='#333333'"


def curves(of: Mapping[str, Sequence[Point]], x_title: str, y_title: str) -> str:
    """of: by name `(share of the KV in GPU memory, KL)`, both above 0. A curve of one point is a mark."""
    points = [point for each in of.values() for point in each]
    low_x, high_x = (around(math.log2(x) for x, _ in points)) if points else (-4.0, 0.0)
    low_y, high_y = (around(math.log10(y) for _, y in points)) if points else (-4.0, 0.0)

    def place(point: Point) -> Point:
        x = (math.log2(point[0]) - low_x) / (high_x - low_x)
        y = (math.log10(point[1]) - low_y) / (high_y - low_y)
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_title, "middle"),
        text(0, 0, y_title, "middle", f"transform='translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)'"),
    ]
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        x, _ = place((2.0**power, 10**low_y))
        parts += [
            line((x, TOP), (x, HEIGHT - BOTTOM)),
            text(x, HEIGHT - BOTTOM + 20, f"{100 * 2.0**power:g}%", "middle"),
        ]
    for power in range(math.ceil(low_y), math.floor(high_y) + 1):
        _, y = place((2**low_x, 10.0**power))
        parts += [line((LEFT, y), (WIDTH - RIGHT, y)), text(LEFT - 8, y + 4, f"{10.0**power:g}", "end")]
    ends = {}
    for (name, own), colour in zip(of.items(), COLOURS * (1 + len(of) // len(COLOURS)), strict=False):
        placed = [place(point) for point in sorted(own)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'/>" for x, y in placed]
        if placed:
            ends[name] = placed[-1], colour
    below = -math.inf
    for name, ((x, y), colour) in sorted(ends.items(), key=lambda each: each[1][0][1]):  # names do not overlap
        below = max(y, below + 15)
        at = WIDTH - RIGHT + 10
        parts.append(line((x + 5, y), (at - 2, below), f"stroke='{colour}' stroke-dasharray='2 3'"))
        parts.append(text(at, below + 4, name, "start", f"style='fill:{colour}'"))
    return "\n".join([*parts, "</svg>\n"])


def around(values: Iterable[float]) -> tuple[float, float]:
    """The range of some logarithms, with room on both sides."""
    found = list(values)
    return min(found) - 0.3, max(found) + 0.3


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Words at a place."""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {STYLE} {more}>{escape(words)}</text>"


def line(begin: Point, end: Point, more: str = "stroke='#dddddd'") -> str:
    """From one place to another."""
    (a, b), (c, d) = begin, end
    return f"<line x1='{a:.1f}' y1='{b:.1f}' x2='{c:.1f}' y2='{d:.1f}' {more}/>"
