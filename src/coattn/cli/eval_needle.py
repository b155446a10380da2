"""`coattn eval needle`: what a method still finds, at which depth and length."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import numbers
from coattn.cli.eval_answers import answer_options, composed_method, open_asker
from coattn.cli.evaluate import evaluate
from coattn.cli.options import Count
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.text import read_text

GRID = {"lengths": [1024, 2048, 4096], "depths": 5}
MOST_DEPTHS = 1000
QUICK = {"lengths": [1024, 2048], "depths": 3}
"""A minute or two for the embedded model on two cores."""


@evaluate.command()
@click.option("--lengths", callback=numbers, help="Tokens of the prompts.  [default: 1024,2048,4096]")
@click.option("--depths", type=Count(1, MOST_DEPTHS), help="Places from beginning to end.  [default: 5]")
@click.option("--keys", default=1, show_default=True, type=Count(1), help="Keys hidden; one is asked for, by name.")
@click.option("--haystack", metavar="FILE", help="A UTF-8 text to hide in; default: the help topics of Python.")
@click.option("--text", "text_file", metavar="FILE", help="The same as --haystack.")
@click.option("--needles", metavar="FILE", help="JSONL with needle, question, answer; default: pass keys.")
@click.option("--seed", default=0, show_default=True, type=Count(0), help="Decides the keys.")
@click.option("--quick", is_flag=True, help="1,024 and 2,048 tokens, three depths, unless other options say so.")
@answer_options("Also write the JSON there.")
def needle(**options: Any) -> None:
    """Hide a key in a long text, ask for it, and count how often it is found: depth x length."""
    composed = composed_method(options)
    options |= {name: options[name] or value for name, value in (QUICK if options["quick"] else GRID).items()}
    text, target = read_text(haystack_file(options)), writable(options["target"])

    from coattn.engine.params import SamplingParams
    from coattn.provenance import provenance
    from coattn.tools.evaluate import needle as grid_of
    from coattn.tools.evaluate.asking import Ask
    from coattn.tools.evaluate.haystack import Haystack
    from coattn.tools.evaluate.needles import read_needles

    needles = read_needles(options["needles"]) if options["needles"] else []
    if needles and options["keys"] > 1:
        raise ConfigError("Both --needles and --keys are given.", "Leave one out.")
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
        raise ConfigError("Both --haystack and --text are given.", "They mean the same: leave one out.")
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
