"""Figures of `coattn-lab eval attention`: one file per analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate import drawing
from coattn_lab.evaluate.wording import share


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Writes `NAME.locality.png`, `NAME.drift.png` and `NAME.query_ahead.png` beside `NAME.json`."""
    written = []
    for name, plot in (("locality", locality), ("drift", drift), ("query_ahead", query_ahead)):
        target = path.with_suffix(f".{name}.png")
        drawing.save(plot(result[name]), target)
        written.append(target)
    return written


def locality(found: dict[str, Any]) -> pyplot.Figure:
    """Entries for the mass per layer and head; cumulative mass per layer."""
    figure, (heads, curve) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    image = heads.imshow([[100 * x for x in row] for row in found["share"]], aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=heads, label="% of the entries")
    heads.set_title(f"entries for {found['mass']:.0%} of the mass")
    heads.set_xlabel("query head")
    heads.set_ylabel("layer")
    image = curve.imshow(found["curve"]["mass"], aspect="auto", cmap="magma", vmin=0, vmax=1)
    figure.colorbar(image, ax=curve, label="mass")
    curve.set_title("mass of the largest entries, mean over heads")
    curve.set_xticks(
        range(len(found["curve"]["shares"])), [share(each) for each in found["curve"]["shares"]], fontsize=8
    )
    curve.set_xlabel("share of the entries")
    return figure


def drift(found: dict[str, Any]) -> pyplot.Figure:
    """Change rate per layer."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for name, label in (("mass", "by true mass"), ("bound", "by Quest's bound")):
        if found[name]["layers"]:
            axes.plot([100 * x for x in found[name]["layers"]], marker=".", lw=1, label=label)
    axes.set_xlabel("layer")
    axes.set_ylabel("blocks that change per step, %")
    axes.set_title(f"the best {found['budget']:,} tokens in blocks of {found['block']}")
    drawing.legend_below(figure, axes)
    return figure


def query_ahead(found: dict[str, Any]) -> pyplot.Figure:
    """Cosine per layer and variant."""
    labels = {"norm_rope": "norm and RoPE", "norm": "norm, no RoPE", "rope": "RoPE, no norm", "neither": "neither"}
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, label in labels.items():
        layers = found[name]["layers"]
        axes.plot(range(1, len(layers)), layers[1:], marker=".", lw=1, label=label)
    axes.set_xlabel("layer")
    axes.set_ylabel("cosine, predicted and real query")
    drawing.legend_below(figure, axes)
    return figure
