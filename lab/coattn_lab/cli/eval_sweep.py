"""`coattn-lab eval sweep`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.table import Table

from coattn.cli.evaluate import Subject, prepare, text_options
from coattn.cli.options import parse_settings
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.text import default_text
from coattn_lab.cli.groups import evaluate

if TYPE_CHECKING:
    from coattn_lab.evaluate.sized import Files
    from coattn_lab.evaluate.sweep import Row


@evaluate.command()
@click.argument("rows", nargs=-1, required=True)
@click.option("--budget", help="Set each row's size so that its KV on the GPU is this share: 6.25%,12.5%.")
@click.option(
    "--like", multiple=True, metavar="ROW", help="Run this row as it is, and others at its bytes; repeatable."
)
@click.option(
    "--files", metavar="DIR", help="Where what is calibrated lies; default: beside --out, or in a folder that is lost."
)
@text_options
def sweep(rows: tuple[str, ...], budget: str | None, like: tuple[str, ...], files: str | None, **options: Any) -> None:
    """Perplexity and fidelity of many rows on the same windows, beside full attention, which is read once.

    A row is a method and its parameters; alternatives stand beside each other and are all run:

    \b
    coattn-lab eval sweep "hgca,window_blocks=32|128,beta=0.5|1" oracle,budget=2048 --prefill 7168
    coattn-lab eval sweep scout hcattention quest hgca --like auto --prefill 7168

    With --budget or --like each row's own size parameters are set so that its KV in GPU memory is that share of all, in
    turn for each share; a row whose size is given runs as it is. The codebook of hcattention, the skew of infinigen and
    the heads of duo are then made of Python's help topics where no file is given.
    """
    from coattn_lab.evaluate.sweep import expand
    from coattn_lab.evaluate.tasks.budget import parse_budgets

    wanted, measures = ([row for spec in specs for row in expand(spec, parse_settings)] for specs in (rows, like))
    sizes = Sizes(parse_budgets(budget) if budget else [], measures)
    target, subject = writable(options["target"]), prepare(options)
    with kept(files, target) as folder:
        sweep_rows(subject, wanted, sizes, folder, target, options["as_json"])


class Sizes(NamedTuple):
    """Shares of the KV, and rows whose bytes others get."""

    shares: list[float | None]
    measures: list[Row]


@contextmanager
def kept(files: str | None, target: Path | None) -> Iterator[Path]:
    """The folder for what is calibrated."""
    if files is not None:
        yield Path(files)
    elif target is not None:
        yield target.with_name(f"{target.stem}_calibrated")
    else:
        with TemporaryDirectory() as lost:
            yield Path(lost)


def sweep_rows(
    subject: Subject, rows: list[Row], sizes: Sizes, folder: Path, target: Path | None, as_json: bool
) -> None:
    """Sizes the rows, runs those that are missing, writes the result, prints it."""
    from coattn_lab.evaluate.results import Results
    from coattn_lab.evaluate.sized import Files, at_budgets

    def say(text: str) -> None:
        err.print(text, soft_wrap=True, highlight=False)

    wanted, files = {row.name: row for row in rows}, None
    if any(sizes):
        files = Files(subject.loaded, folder, default_text(), say)
        windows = len(subject.windows.starts), subject.windows.length
        wanted = at_budgets(rows, sizes.shares, sizes.measures, windows, files)
    settings = {name: row.composed.params for name, row in wanted.items()}
    config = {"evaluation": "sweep", **subject.config(), "rows_wanted": list(wanted), "settings": settings}
    results = Results(target, config, lambda _: {}, items="rows", key="row")
    run(subject, results, wanted, files)
    result = results.finish(list(wanted))
    if target is not None:
        err.print(f"wrote {target}", soft_wrap=True)
    if as_json:
        print_json(result)
    else:
        show(result, subject)


def run(subject: Subject, results: Any, wanted: dict[str, Row], files: Files | None) -> None:
    """Adds the rows that are missing, with a bar that shows the time left."""
    from coattn.hf.sketches import with_sketches
    from coattn_lab.evaluate.sweep import compare, full, read

    todo = {name: row for name, row in wanted.items() if name not in results.done}
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
        for name, row in todo.items():
            started = time.perf_counter()
            ready = row if files is None else files.complete(row)
            found = compare(one(name, with_sketches(ready.composed, subject.loaded)), reference)
            results.add({"row": name, **found, **row.size, "seconds": round(time.perf_counter() - started, 1)})


def show(result: dict[str, Any], subject: Subject) -> None:
    """The table for people."""
    table = Table(title=subject.where())
    kept = "attended", "of it in DRAM", "KV on GPU", "ms", "error", "fetched"
    for name in ("row", "perplexity", "ratio", "95%", "KL", "95%", "top-1", *kept):
        own = name == "row"  # rows may differ in their last digit alone
        table.add_column(name, justify="left" if own else "right", overflow="fold" if own else "ellipsis")
    for row in result["rows"]:
        interval = row["ratio_95"]
        gpu, host = row["attended_gpu"], row["attended_host"]
        table.add_row(
            row["row"],
            f"{row['perplexity']:.4f}",
            f"{row['ratio']:.4f}",
            f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "",
            f"{row['kl']:.3g}",
            f"{row['kl_95'][0]:.2g} to {row['kl_95'][1]:.2g}" if row.get("kl_95") else "",
            f"{row['top1']:.1%}",
            f"{gpu + host:,.0f}",
            f"{host:,.0f}",
            f"{row['gpu_share']:.2%}" if "gpu_share" in row else "",
            f"{row['step_ms']:.1f}" if "step_ms" in row else "",
            f"{error:.2g}" if (error := row.get("audit", {}).get("error")) is not None else "",
            f"{row['row_entries']:.0f}, {row.get('later_entries', 0.0):.0f}" if "row_entries" in row else "",
        )
    out.print(table)
    full = result["rows"][0]["perplexity_full"] if result["rows"] else float("nan")
    out.print(f"full attention {full:.4f}; entries attended per sequence and KV head in the last step", highlight=False)
