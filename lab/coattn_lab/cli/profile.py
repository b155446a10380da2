"""`coattn-lab profile`: measures on a model and a text what a method's parameters should be."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.evaluate import prepare, text_options
from coattn.cli.options import Count, Number, parse_settings
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import ConfigError, InputError


@click.group()
def profile() -> None:
    """Measure on a model and a text what a method's parameters should be."""


@profile.command()
@text_options
@click.option("--budget", default=2048, show_default=True, type=Count(1), help="Tokens attended per KV head.")
@click.option("--block", default=32, show_default=True, type=Count(1), help="Tokens per block.")
@click.option(
    "--beta",
    default=0.12,
    show_default=True,
    type=Number(0, 1),
    help="The most of the budget that the CPU may attend to, on average.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another parameter of scout; repeatable.")
def scout(**options: Any) -> None:
    """How often each layer should recall missed blocks under `scout`: as rarely as keeps the CPU's share under --beta.

    --out writes the intervals; give the file to the method as `--set recall_file=FILE`.
    """
    given = settings_of(options)
    target, subject = writable(options["target"]), prepare(options)
    if subject.windows.prefill <= options["budget"]:
        raise InputError(
            f"--prefill is {subject.windows.prefill:,}, no more than --budget: nothing would be missed.",
            "Give more to --prefill, or less to --budget.",
        )

    from coattn.hf.architectures import describe_layers
    from coattn.provenance import provenance
    from coattn_lab.evaluate.recalls import profile as measure
    from coattn_lab.evaluate.results import write_json

    with progress("scout", subject.windows.length) as bar:
        found = measure(
            subject.loaded.model,
            subject.ids,
            subject.windows,
            beta=options["beta"],
            batch=options["batch"],
            progress=lambda done, _all: bar.update(bar.task_ids[0], completed=done),
            **given,
        )
    marks = [shape.mark for shape in describe_layers(subject.loaded.model)]
    result = {"profile": "scout", **found, "params": given, "marks": marks, **subject.config(), **provenance()}
    if target is not None:
        write_json(target, result)
        err.print(f"wrote {target}", soft_wrap=True)
    if options["as_json"]:
        print_json(result)
    else:
        out.print(f"{describe(result)}\n{subject.where()}", highlight=False)


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """The method's parameters; refuses what is no parameter, and what this command is to find out or says otherwise."""
    from coattn.method.row import compose
    from coattn.method.table import find_method

    given = parse_settings(options["settings"])
    for name, instead in (("budget", "Use --budget."), ("block", "Use --block.")):
        if name in given:
            raise ConfigError(f"--set {name} would say it twice.", instead)
    for name in ("recall_interval", "recall_file"):
        if name in given:
            raise ConfigError(f"--set {name} is what this command finds out.", "Leave it out.")
    given |= {"budget": options["budget"], "block": options["block"]}
    compose(find_method("scout"), **given)
    return given


def describe(result: dict[str, Any]) -> str:
    """Two lines for people."""
    intervals = result["recall_intervals"]
    return (
        f"recall every {result['interval_mean']:.1f} steps on average ({min(intervals)} to {max(intervals)}), "
        f"CPU ratio {result['cpu_ratio_mean']:.1%} with budget {result['budget']:,} and beta {result['beta']:.0%}\n"
        f"layer by layer: {' '.join(map(str, intervals))}"
    )
