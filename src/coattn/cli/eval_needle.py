"""`coattn eval needle`: which keys a method finds, by depth and length."""

from typing import Any

import click

from coattn.cli.evaluate import evaluate
from coattn.cli.options import (
    compose_method,
    count_option,
    json_option,
    load_model,
    method_options,
    model_options,
    numbers,
    out_option,
    text_option,
)
from coattn.cli.output import keep, print_json, print_table, progress, save, writable
from coattn.errors import ConfigError
from coattn.text import read_text
from coattn.units import parse_share

GRID = {"lengths": [1024, 2048, 4096], "depths": 5}
QUICK = {"lengths": [1024, 2048], "depths": 3}
"""A minute or two for the embedded model on two cores."""


@evaluate.command()
@click.option("--lengths", callback=numbers, help="Lengths of the prompts in tokens.  [default: 1024,2048,4096]")
@count_option("--depths", None, "Number of places from beginning to end.  [default: 5]", most=1000)
@count_option("--seed", 0, "Seed of the keys.", 0)
@click.option(
    "--quick", is_flag=True, help="Use 1,024 and 2,048 tokens and three depths, unless other options are given."
)
@model_options
@text_option
@method_options()
@click.option(
    "--gpu-share", metavar="SHARE", help="Limit the KV cache in GPU memory to this share of each prompt's, such as 1/8."
)
@count_option("--chunk", None, "Prompt tokens per step.  [default: whole prompts, read exactly]")
@count_option("--batch", 8, "Prompts answered together.")
@out_option
@json_option
def needle(**options: Any) -> None:
    """Hide a key in a long text, ask for it, and show at which depths and lengths it is found."""
    from coattn.provenance import provenance
    from coattn.tools.evaluate import needle as task
    from coattn.tools.evaluate.haystack import Haystack, check_length

    memory = {name: options[name] for name in ("gpu_kv", "host_kv")}
    memory["gpu_share"] = parse_share(options["gpu_share"], "--gpu-share")
    if memory["gpu_share"] is not None and memory["gpu_kv"] is not None:
        raise ConfigError("--gpu-kv and --gpu-share exclude each other.", "Give one of them.")
    composed = compose_method(options)
    options |= {name: options[name] or value for name, value in (QUICK if options["quick"] else GRID).items()}
    text, target = read_text(options["text_file"]), writable(options["target"])
    said = {name: options[name] for name in ("lengths", "depths", "seed")}
    cells = task.grid(**said)
    longest = max(options["lengths"])
    length = longest, task.NEW_TOKENS
    loaded = load_model(options, check=lambda _, most: check_length(options["model"], most, *length))
    haystack = Haystack(text, loaded.tokenizer, longest)
    prompts = {cell: task.prompt(cell, haystack) for cell in cells}
    judged: dict[Any, dict[str, Any]] = {}
    peak = {"gpu_kv_peak": 0, "host_kv_peak": 0}
    with progress("needle", len(cells)) as bar:
        for each in task.ask(loaded, composed, prompts, **memory, batch=options["batch"], chunk=options["chunk"]):
            judged[each.cell] = task.judge(each.cell, each.text)
            peak = {name: max(most, each.report[name]) for name, most in peak.items()}
            keep(target, cells=[*judged.values()])
            bar.advance(bar.task_ids[0])
    rows = [judged[cell] for cell in cells]
    result = {
        **task.summarise(rows),
        "cells": rows,
        "evaluation": "needle",
        "model": loaded.name,
        **composed.describe(),
        "text": text.as_dict(),
        **said,
        **memory,
        **peak,
        **provenance(),
    }
    save(target, result)
    print_json(result) if options["as_json"] else show(result)


def show(result: dict[str, Any]) -> None:
    """The grid for people: depth down, length across."""
    lengths = [each["length"] for each in result["by_length"]]
    found = {(cell["depth"], cell["length"]): cell["found"] for cell in result["cells"]}
    marks = {True: "[green]found[/green]", False: "[red]lost[/red]"}
    depths = sorted({depth for depth, _ in found})
    rows = ((f"{depth:.0%}", *(marks[found[depth, length]] for length in lengths)) for depth in depths)
    title = f"{result['model']}, {result['method']}: {result['found']} of {result['total']} found"
    print_table((">depth", *(f">{length:,}" for length in lengths)), rows, title)
