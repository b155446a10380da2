"""`coattn eval needle`: which keys a method finds, by depth and length."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import numbers
from coattn.cli.eval_answers import answer_options, composed_method, open_asker
from coattn.cli.evaluate import evaluate
from coattn.cli.options import count_option
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.text import read_text

GRID = {"lengths": [1024, 2048, 4096], "depths": 5}
MAX_DEPTHS = 1000
QUICK = {"lengths": [1024, 2048], "depths": 3}
"""A minute or two for the embedded model on two cores."""


@evaluate.command()
@click.option("--lengths", callback=numbers, help="Lengths of the prompts in tokens.  [default: 1024,2048,4096]")
@count_option("--depths", None, "Number of places from beginning to end.  [default: 5]", most=MAX_DEPTHS)
@count_option("--keys", 1, "Number of hidden keys; the question asks for one of them by name.")
@click.option(
    "--haystack", metavar="FILE", help="Hide the key in this UTF-8 text instead of the help topics of Python."
)
@click.option("--text", "text_file", metavar="FILE", help="Same as --haystack.")
@click.option(
    "--needles", metavar="FILE", help="Read needles, questions and answers from this JSONL file.  [default: pass keys]"
)
@count_option("--seed", 0, "Seed of the keys.", 0)
@click.option(
    "--quick", is_flag=True, help="Use 1,024 and 2,048 tokens and three depths, unless other options are given."
)
@answer_options("Also write the JSON to FILE.")
def needle(**options: Any) -> None:
    """Hide a key in a long text, ask for it, and show at which depths and lengths it is found."""
    composed = composed_method(options)
    options |= {name: options[name] or value for name, value in (QUICK if options["quick"] else GRID).items()}
    text, target = read_text(haystack_file(options)), writable(options["target"])

    from coattn.engine.sampling.params import SamplingParams
    from coattn.provenance import provenance
    from coattn.tools.evaluate import needle as grid_of
    from coattn.tools.evaluate.asking import Ask
    from coattn.tools.evaluate.haystack import Haystack
    from coattn.tools.evaluate.needles import read_needles

    needles = read_needles(options["needles"]) if options["needles"] else []
    if needles and options["keys"] > 1:
        raise ConfigError("--needles and --keys exclude each other.", "Give one of them.")
    cells = grid_of.grid(
        options["lengths"], options["depths"], keys=options["keys"], needles=needles, seed=options["seed"]
    )
    asker = open_asker(options, composed)
    asker.by_length = True  # a row's budget is a share of each prompt, not of the longest
    asker.check_length(max(options["lengths"]), grid_of.NEW_TOKENS)  # before a text of that length is made
    haystack = Haystack(text, asker.loaded.tokenizer, max(options["lengths"]))
    params = SamplingParams(max_new_tokens=grid_of.NEW_TOKENS)
    asks = [Ask(cell.name, grid_of.prompt(cell, haystack), params) for cell in cells]
    by_name = {cell.name: cell for cell in cells}
    rows: list[dict[str, Any]] = []
    with progress("needle", sum(len(ask.ids) for ask in asks)) as bar:
        for ask, answer in asker.run(asks, lambda tokens: bar.advance(bar.task_ids[0], tokens)):
            cell = by_name[ask.name]
            rows.append(grid_of.judge(cell, answer) | {"read_share": asker.read_share.get(cell.length)})
            keep(target, cells=rows)
    rows.sort(key=lambda row: [cell.name for cell in cells].index(row["cell"]))
    result = {
        **grid_of.summarise(rows),
        "cells": rows,
        "evaluation": "needle",
        "model": asker.loaded.name,
        "method": composed.method.name,
        "exact": composed.exact,
        "params": dict(composed.params),
        "text": {"name": text.name, "sha256": text.sha256},
        **{name: options[name] for name in ("lengths", "depths", "keys", "seed", "gpu_kv", "host_kv", "gpu_share")},
        **asker.peak,
        **provenance(),
    }
    save(target, result)
    print_json(result) if options["as_json"] else show(result)


def haystack_file(options: dict[str, Any]) -> str | None:
    """The haystack by either of its names."""
    given = [options[name] for name in ("haystack", "text_file") if options[name]]
    if len(given) > 1:
        raise ConfigError("--haystack and --text mean the same.", "Give one of them.")
    return given[0] if given else None


def show(result: dict[str, Any]) -> None:
    """The grid for people: depth down, length across."""
    table = Table(title=f"{result['model']}, {result['method']}: {result['found']} of {result['total']} found")
    table.add_column("depth", justify="right")
    for each in result["by_length"]:
        table.add_column(f"{each['length']:,}", justify="center")
    found = {(cell["depth"], cell["length"]): cell["found"] for cell in result["cells"]}
    for depth in sorted({depth for depth, _ in found}):
        marks = [found[depth, each["length"]] for each in result["by_length"]]
        table.add_row(f"{depth:.0%}", *("[green]found[/green]" if mark else "[red]lost[/red]" for mark in marks))
    out.print(table)
