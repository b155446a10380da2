"""`coattn-lab eval attention`."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.evaluate import prepare, text_options
from coattn.cli.options import Count, Number
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import InputError
from coattn_lab.cli.groups import evaluate


@evaluate.command()
@text_options
@click.option("--budget", default=1024, show_default=True, type=Count(1), help="Tokens whose blocks are followed.")
@click.option("--block", default=32, show_default=True, type=Count(1), help="Tokens per block.")
@click.option("--mass", default=0.99, show_default=True, type=Number(0, 1, min_open=True), help="Share of the mass.")
def attention(**options: Any) -> None:
    """Where a model's attention lies on a text: full attention, looked at step by step.

    How many entries hold most of the mass, per layer and head; how many of the best blocks change from step to step;
    how close a query predicted one layer ahead is to the real one.
    """
    if options["budget"] < options["block"]:
        raise InputError("--budget is less than a --block.", "Give --budget as a multiple of --block.")
    target, subject = writable(options["target"]), prepare(options)

    from coattn.provenance import provenance
    from coattn_lab.evaluate.attention import analyse
    from coattn_lab.evaluate.results import write_json

    with progress("full attention", len(subject.windows.starts) * subject.windows.length) as bar:
        found = analyse(
            subject.loaded.model,
            subject.ids,
            subject.windows,
            mass=options["mass"],
            budget=options["budget"],
            block=options["block"],
            batch=options["batch"],
            progress=lambda done, _all: bar.update(bar.task_ids[0], completed=done),
        )
    result = {
        **found,
        "evaluation": "attention",
        "steps": len(subject.windows.starts) * subject.windows.decode,
        **subject.config(),
        **provenance(),
    }
    if target is not None:
        write_json(target, result)
        err.print(f"wrote {target}", soft_wrap=True)
    if options["as_json"]:
        print_json(result)
    else:
        out.print(f"{describe(result)}\n{subject.where()}", highlight=False)


def describe(result: dict[str, Any]) -> str:
    """Three lines for people."""
    locality, drift, query = (result[name] for name in ("locality", "drift", "query_ahead"))
    return "\n".join(
        [
            f"{locality['mass']:.0%} of the mass: {locality['entries_mean']:,.0f} entries per head on average "
            f"({locality['share_mean']:.1%})",
            f"the best {drift['budget']:,} tokens in blocks of {drift['block']}: per step change "
            f"{_rate(drift['mass'])} by true mass, {_rate(drift['bound'])} by Quest's bound",
            "cosine of the query predicted one layer ahead: "
            + ", ".join(
                f"{label} {_cosine(query[name])}"
                for name, label in (
                    ("norm_rope", "with norm and RoPE"),
                    ("norm", "without RoPE"),
                    ("rope", "without norm"),
                    ("neither", "without both"),
                )
            ),
        ]
    )


def _rate(found: dict[str, Any]) -> str:
    return "unknown" if found["mean"] is None else f"{found['mean']:.1%}"


def _cosine(found: dict[str, Any]) -> str:
    return "unknown" if found["mean"] is None else f"{found['mean']:.3f}"
