"""`coattn-lab bench hcattention`: the paper's tables on any model and text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from coattn.cli.bench import numbers
from coattn.cli.evaluate import Subject, prepare
from coattn.cli.options import Count, json_option, model_options
from coattn.cli.output import err, out, print_json, progress, writable
from coattn.errors import InputError
from coattn.units import format_bytes
from coattn_lab.cli.groups import bench

if TYPE_CHECKING:
    from coattn_lab.bench.hcattention import Row

TABLES = ("budgets", "3", "4", "renormalise")
SPEED = ("kernels", "long", "prompt")


@bench.command()
@click.option(
    "--table", "name", default="budgets", show_default=True, type=click.Choice(TABLES + SPEED), help="Which rows."
)
@model_options
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--length", default=8192, show_default=True, type=Count(4), help="Tokens of the text.")
@click.option("--decode", default=128, show_default=True, type=Count(2), help="Of them, decode steps.")
@click.option("--start", default=0, show_default=True, type=Count(0), help="Where in the text to begin.")
@click.option(
    "--books", metavar="FOLDER", help="Codebooks, named like groups16_centroids8192.safetensors or ..._separate."
)
@click.option("--shapes", default="llama-3-8b", show_default=True, help="long, prompt: model shapes by name.")
@click.option(
    "--context", default="32768,131072,1048576", show_default=True, callback=numbers, help="kernels: context lengths."
)
@click.option("--rows", default="1m,4m", show_default=True, help="long: which rows, of 1m and 4m.")
@click.option(
    "--gpu-memory", default="80GiB", show_default=True, help="long: all that may be taken of the GPU's memory."
)
@click.option("--kept", default=0.065, show_default=True, help="kernels, long: share of tokens a KV head attends to.")
@click.option("--tokens", default=262144, show_default=True, type=Count(64), help="prompt: its length.")
@click.option("--block", default=8192, show_default=True, type=Count(1), help="prompt: tokens of a block.")
@click.option("--anchor", type=Count(0), help="prompt: tokens of the anchor; default: a block.")
@click.option("--steps", default=16, show_default=True, type=Count(3), help="long, prompt: decode steps.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="long, prompt: a parameter; repeatable.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there; goes on from a run that was cut off.")
@json_option
def hcattention(**options: Any) -> None:
    """What the thresholds and codebooks of HCAttention cost, row by row, against full attention.

    The text is prefilled exactly, once for all rows; each row then decodes the rest of it under its setting.

    kernels, long and prompt measure speed instead, on random numbers: the GPU's kernels alone; decode steps over one
    and four million tokens; a prompt read block by block and decoded.
    """
    if options["name"] in SPEED:
        from coattn_lab.cli.hcattention_speed import run as run_speed

        run_speed(options)
        return
    from coattn.hf.architectures import describe_layers
    from coattn_lab.bench import hcattention as paper

    target = writable(options["target"])
    options |= {"prefill": None, "stride": None, "length": options["length"] + options["start"]}
    subject = prepare(options)
    rows = list(paper.TABLES[options["name"]](describe_layers(subject.loaded.model)[0].head_dim))
    folder = Path(options["books"] or ".")
    needed = {paper.book_name(row.book) for row in rows if row.book}
    absent = {name for name in needed if not (folder / name).exists()}
    if absent:
        raise InputError(
            f"{folder} lacks {', '.join(sorted(absent))}.",
            "Make them with `coattn calibrate hcattention --groups .. --centroids .. --out ..`, from another text.",
        )
    result = run(rows, subject, folder, target, options["name"])
    if options["as_json"]:
        print_json(result)
        return
    show(result)
    err.print(subject.where(), soft_wrap=True)


def run(rows: list[Row], subject: Subject, folder: Path, target: Path | None, name: str) -> dict[str, Any]:
    """Measures the rows that the file does not hold yet."""
    from coattn.tools.evaluate.forced import Forced
    from coattn_lab.bench.hcattention import book_name, measure
    from coattn_lab.evaluate.results import Results
    from coattn_lab.evaluate.resumed import prefill_once, resume

    results = Results(
        target, {"bench": "hcattention", "table": name, **subject.config()}, lambda _: {}, items="rows", key="row"
    )
    todo = [row for row in rows if row.name not in results.done]
    if todo:
        model, start, windows = subject.loaded.model, subject.windows.starts[0], subject.windows
        with progress("prefill", len(todo) + 1) as bar:
            begun = prefill_once(model, subject.ids[start : start + windows.length], windows.prefill)
            full, _ = resume(model, begun, "full")
            exact: dict[str, Forced] = {}
            # a row that others are compared with runs again where a run goes on without it
            wanted = {row.beside for row in todo} - {None}
            for row in [row for row in rows if row in todo or row.name in wanted]:
                bar.update(bar.task_ids[0], description=row.name, advance=1)
                params = dict(row.params)
                if row.book is not None:
                    params["codebook"] = str(folder / book_name(row.book))
                own, shares = resume(model, begun, "hcattention", **params)
                if row.beside is None:
                    exact[row.name] = own
                if row in todo:
                    results.add(measure(row, own, full, exact.get(row.beside or ""), shares))
    return results.finish([row.name for row in rows])


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(title=f"hcattention, {result['table']}: {result['model']}, {result['length']:,} tokens")
    for column in ("row", "perplexity", "/ full", "/ exact keys", "KL", "top-1", "attended", "GPU KV", "DRAM KV"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in result["rows"]:
        beside = row["against_exact_keys"]
        table.add_row(
            row["row"], f"{row['perplexity']:.3f}", f"{row['against_full']['ratio']:.4f}",
            "" if beside is None else f"{beside['ratio']:.4f}", f"{row['kl']:.2g}", f"{row['top1']:.1%}",
            f"{row['share_attended']:.1%}", format_bytes(row["gpu_kv_bytes"]), format_bytes(row["host_kv_bytes"]),
        )  # fmt: skip
    out.print(table)
