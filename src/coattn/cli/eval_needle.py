"""`coattn eval needle`: which keys a method finds, by depth and length."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.evaluate import evaluate
from coattn.cli.options import (
    Count,
    compose_method,
    count_option,
    gpu_kv_option,
    host_kv_option,
    join,
    json_option,
    load_model,
    method_option,
    model_options,
    numbers,
    out_option,
    settings_option,
)
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.text import read_text
from coattn.units import parse_share

GRID = {"lengths": [1024, 2048, 4096], "depths": 5}
QUICK = {"lengths": [1024, 2048], "depths": 3}
"""A minute or two for the embedded model on two cores."""
engine_options = join(
    model_options,
    method_option(),
    gpu_kv_option,
    click.option(
        "--gpu-share",
        metavar="SHARE",
        help="Limit the KV cache in GPU memory to this share of each prompt's, such as 1/8.",
    ),
    host_kv_option,
    settings_option,
    click.option("--chunk", type=Count(1), help="Prompt tokens per step.  [default: whole prompts, read exactly]"),
    count_option("--batch", 8, "Prompts answered together."),
)


@evaluate.command()
@click.option("--lengths", callback=numbers, help="Lengths of the prompts in tokens.  [default: 1024,2048,4096]")
@count_option("--depths", None, "Number of places from beginning to end.  [default: 5]", most=1000)
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
@engine_options
@out_option
@json_option
def needle(**options: Any) -> None:
    """Hide a key in a long text, ask for it, and show at which depths and lengths it is found."""
    from coattn.provenance import provenance
    from coattn.tools.evaluate import needle as grid_of
    from coattn.tools.evaluate.asking import Asker
    from coattn.tools.evaluate.haystack import Haystack
    from coattn.tools.evaluate.needles import read_needles

    memory = {name: options[name] for name in ("gpu_kv", "host_kv")}
    memory["gpu_share"] = parse_share(options["gpu_share"], "--gpu-share")
    if memory["gpu_share"] is not None and memory["gpu_kv"] is not None:
        raise ConfigError("--gpu-kv and --gpu-share exclude each other.", "Give one of them.")
    if options["haystack"] and options["text_file"]:
        raise ConfigError("--haystack and --text mean the same.", "Give one of them.")
    composed = compose_method(options)
    options |= {name: options[name] or value for name, value in (QUICK if options["quick"] else GRID).items()}
    text, target = read_text(options["haystack"] or options["text_file"] or None), writable(options["target"])
    needles = read_needles(options["needles"]) if options["needles"] else []
    if needles and options["keys"] > 1:
        raise ConfigError("--needles and --keys exclude each other.", "Give one of them.")
    lengths, depths, keys, seed = (options[name] for name in ("lengths", "depths", "keys", "seed"))
    cells = {cell.name: cell for cell in grid_of.grid(lengths, depths, keys=keys, needles=needles, seed=seed)}
    loaded = load_model(options)
    asker = Asker(loaded, composed, **memory, batch=options["batch"], chunk=options["chunk"])
    asker.check_length(max(lengths), grid_of.NEW_TOKENS)  # before a text of that length is made
    haystack = Haystack(text, loaded.tokenizer, max(lengths))
    prompts = {name: grid_of.prompt(cell, haystack) for name, cell in cells.items()}
    judged: dict[str, dict[str, Any]] = {}
    with progress("needle", sum(map(len, prompts.values()))) as bar:
        for each in asker.run(prompts, grid_of.NEW_TOKENS, lambda tokens: bar.advance(bar.task_ids[0], tokens)):
            judged[each.name] = grid_of.judge(cells[each.name], each.text) | {"read_share": each.read_share}
            keep(target, cells=[*judged.values()])
    rows = [judged[name] for name in cells]
    result = {
        **grid_of.summarise(rows),
        "cells": rows,
        "evaluation": "needle",
        "model": loaded.name,
        **composed.describe(),
        "text": {"name": text.name, "sha256": text.sha256},
        "lengths": lengths,
        "depths": depths,
        "keys": keys,
        "seed": seed,
        **memory,
        **asker.peak,
        **provenance(),
    }
    save(target, result)
    print_json(result) if options["as_json"] else show(result)


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
