"""`coattn eval sweep`."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.table import Table

from coattn.cli.evaluate import Subject, evaluate, prepare, resumed_options
from coattn.cli.options import parse_settings
from coattn.cli.output import err, out, print_json, progress, writable


@evaluate.command()
@click.argument("rows", nargs=-1, required=True)
@resumed_options
def sweep(rows: tuple[str, ...], **options: Any) -> None:
    """Perplexity and fidelity of many rows on the same windows, beside full attention, which is read once.

    A row is a method and its parameters; alternatives stand beside each other and are all run:

    \b
    coattn eval sweep "hgca,window_blocks=32|128,beta=0.5|1" oracle,budget=2048 --prefill 7168
    """
    from coattn.evaluate.sweep import expand

    wanted = {row.name: row for spec in rows for row in expand(spec, parse_settings)}
    target, subject = writable(options["target"]), prepare(options)

    from coattn.evaluate.results import Results
    from coattn.evaluate.sweep_figure import draw

    config = {"evaluation": "sweep", **subject.config(), "rows_wanted": list(wanted)}
    results = Results(target, config, lambda _: {}, items="rows", key="row")
    run(subject, results, wanted)
    result = results.finish(list(wanted))
    if target is not None:
        draw(result, target.with_suffix(".png"))
        err.print(f"wrote {target} and {target.with_suffix('.png')}", soft_wrap=True)
    if options["as_json"]:
        print_json(result)
    else:
        show(result, subject)


def run(subject: Subject, results: Any, wanted: dict[str, Any]) -> None:
    """Adds the rows that are missing, with a bar that shows the time left."""
    from coattn.evaluate.sweep import compare, full, read

    todo = {name: row.composed for name, row in wanted.items() if name not in results.done}
    if not todo:
        return
    windows, prefill = subject.windows.of(subject.ids), subject.windows.prefill
    with progress("full", (len(todo) + 1) * windows.shape[1]) as bar:
        done = 0

        def one(name: str, composed: Any) -> Any:
            nonlocal done

            def report(now: int, _all: int) -> None:
                bar.update(bar.task_ids[0], description=name, completed=done + now)

            found = read(subject.loaded.model, windows, prefill, composed, report)
            done += windows.shape[1]
            return found

        reference = one("full", full())
        for name, composed in todo.items():
            started = time.perf_counter()
            own = one(name, composed)
            results.add({"row": name, **compare(own, reference), "seconds": round(time.perf_counter() - started, 1)})


def show(result: dict[str, Any], subject: Subject) -> None:
    """The table for people."""
    table = Table(title=subject.where())
    for name in ("row", "perplexity", "ratio", "95%", "KL", "top-1", "attended", "of it in DRAM"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for row in result["rows"]:
        interval = row["ratio_95"]
        gpu, host = row["attended_gpu"], row["attended_host"]
        table.add_row(
            row["row"],
            f"{row['perplexity']:.4f}",
            f"{row['ratio']:.4f}",
            f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "",
            f"{row['kl']:.3g}",
            f"{row['top1']:.1%}",
            f"{gpu + host:,.0f}",
            f"{host:,.0f}",
        )
    out.print(table)
    full = result["rows"][0]["perplexity_full"] if result["rows"] else float("nan")
    out.print(f"full attention {full:.4f}; entries attended per sequence and KV head in the last step", highlight=False)
