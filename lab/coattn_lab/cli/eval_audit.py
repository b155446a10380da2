"""`coattn-lab eval audit`."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.evaluate import Subject, prepare, text_options
from coattn.cli.options import Number, parse_settings
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import ConfigError
from coattn_lab.cli.groups import empty_table, evaluate

QUALITIES = (0.9, 0.95, 0.98, 0.99, 0.999)


@evaluate.command()
@click.option(
    "--quality", "qualities", multiple=True, type=Number(0, 1, max_open=True), default=QUALITIES, show_default=True,
    help="A quality to run; repeatable.",
)  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of auto; repeatable.")
@text_options
def audit(qualities: tuple[float, ...], settings: tuple[str, ...], **options: Any) -> None:
    """What `auto` promises and audits, beside the truth: every layer, KV head and step measured.

    For each quality: the error that is allowed, the true one and the audited one with its interval; how often intervals
    of audits drawn anew hold the truth; how often the true mass left out lies where its estimate says, by multiples
    that the first window tells (or the first half of a single one) for the others; entries attended, attention's time.
    """
    from coattn.method.row import compose
    from coattn.method.table import METHODS

    params = parse_settings(settings)
    if "quality" in params:
        raise ConfigError("--set has a quality.", "Give it as --quality; repeat that for several.")
    if params.get("audit") is False:
        raise ConfigError("--set turns the audit off, which is what this measures.", "Leave audit out.")
    wanted = {f"{q:g}": compose(METHODS["auto"], **{**params, "quality": q}) for q in sorted(set(qualities))}
    target, subject = writable(options["target"]), prepare(options)

    from coattn_lab.evaluate.results import Results

    config = {"evaluation": "audit", **subject.config(), "params": params, "rows_wanted": list(wanted)}
    config["settings"] = {name: composed.params for name, composed in wanted.items()}
    results = Results(target, config, lambda _: {}, items="rows", key="row")
    run(subject, results, wanted)
    result = results.finish(list(wanted))
    if target is not None:
        err.print(f"wrote {target}", soft_wrap=True)
    if options["as_json"]:
        print_json(result)
    else:
        show(result, subject)


def run(subject: Subject, results: Any, wanted: dict[str, Any]) -> None:
    """Adds the rows that are missing, with a bar that shows the time left."""
    from coattn.hf.sketches import with_sketches
    from coattn_lab.evaluate.audited import run as measure

    todo = {name: composed for name, composed in wanted.items() if name not in results.done}
    windows, prefill = subject.windows.of(subject.ids), subject.windows.prefill
    with progress("audit", len(todo) * windows.shape[1]) as bar:
        for number, (name, composed) in enumerate(todo.items()):

            def report(now: int, _all: int, before: int = number * windows.shape[1], name: str = name) -> None:
                bar.update(bar.task_ids[0], description=f"quality {name}", completed=before + now)

            row = with_sketches(composed, subject.loaded)
            results.add({"row": name, **measure(subject.loaded.model, windows, prefill, row, report)})


def show(result: dict[str, Any], subject: Subject) -> None:
    """The table for people."""
    heads = "allowed | true error | audited, 95% | held | missed mass | held | foretold | entries | ms"
    table = empty_table(subject.where(), "quality", heads)
    for row in result["rows"]:
        found = row["error_95"]
        table.add_row(
            row["row"],
            f"{row['error_target']:.3g}",
            f"{row['error']:.3g}",
            "" if found is None else f"{found[0]:.3g} to {found[1]:.3g}",
            _share(row["error_covered"]),
            f"{row['missed_mass']:.2%}",
            _share(row["missed_mass_covered"]),
            _share(row["mass_ratio_covered"]),
            f"{row['entries']:,.0f}",
            f"{row['attention_ms']:.1f}",
        )
    out.print(table)
    out.print(
        "held: audits drawn anew whose 95% interval holds the truth; foretold: held-back cases whose missed mass is "
        "where the estimate says; empty: too few steps to say; entries: attended in DRAM per KV head; ms: attention of "
        "all layers in a step",
        highlight=False,
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
