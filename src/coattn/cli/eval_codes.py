"""`coattn eval codes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coattn.cli.evaluate import evaluate, prepare
from coattn.cli.options import Count, json_option, model_options
from coattn.cli.output import err, out, print_json, writable


@evaluate.command()
@model_options
@click.option("--codebook", required=True, metavar="FILE", help="What `coattn calibrate hcattention` wrote.")
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--length", default=1024, show_default=True, type=Count(4), help="Tokens of the text.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there, and a figure beside it.")
@json_option
def codes(**options: Any) -> None:
    """How far attention weights from coded keys are from those of the keys themselves, layer by layer.

    The last token of a text attends to all before it. --out also draws the first weights of four layers, as the figure
    of HCAttention's section 4.3.2 does.
    """
    target = writable(options["target"])
    subject = prepare({**options, "prefill": None, "stride": None, "start": 0, "decode": 1})

    from coattn.evaluate.codes import compare_codes
    from coattn.evaluate.results import write_json
    from coattn.provenance import provenance

    found = compare_codes(subject.loaded.model, subject.ids[: options["length"]], options["codebook"])
    result = {**found, "evaluation": "codes", "codebook": Path(options["codebook"]).name, **subject.config()}
    result |= provenance()
    if target is not None:
        write_json(target, result)
        picture = draw(result, target.with_suffix(".png"))
        err.print(f"wrote {target} and {picture}", soft_wrap=True)
    if options["as_json"]:
        print_json(result)
        return
    moved = result["moved"]
    out.print(
        f"weights from codes: {sum(moved) / len(moved):.2%} of the mass lies elsewhere, at most {max(moved):.2%} "
        f"(layer {moved.index(max(moved))}); correlation at least {min(result['correlation']):.4f}\n{subject.where()}",
        highlight=False,
    )


def draw(result: dict[str, Any], path: Path) -> Path:
    """The first weights of four layers, or as many as there are, from keys and from codes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    places = figure.subplots(-(-len(result["curves"]) // 2), 2, squeeze=False).flat
    for place, (layer, curve) in zip(places, result["curves"].items(), strict=False):
        for name, colour in (("keys", "tab:blue"), ("codes", "tab:red")):
            place.plot(curve[name], color=colour, linewidth=0.8, label=name)
        place.set(title=f"layer {layer}", xlabel="token", ylabel="attention weight", yscale="log")
        place.legend()
    figure.savefig(path, dpi=120)
    return path
