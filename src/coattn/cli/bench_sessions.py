"""`coattn bench sessions`: what stored prefixes and sessions save."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import bench
from coattn.cli.options import Count, json_option, parse_settings
from coattn.cli.output import keep, out, print_json, save, writable
from coattn.errors import CoattnError, ConfigError
from coattn.units import format_bytes, parse_bytes

CHECKS = ("again", "shared", "beside", "disk", "tenants")


@bench.command()
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--checks", default="again", show_default=True, help=f"With commas, of {', '.join(CHECKS)}.")
@click.option(
    "--methods",
    default="full,scout,hgca,window_blocks=128,cpu,window_blocks=128",
    show_default=True,
    help="With commas; NAME=VALUE is a parameter of the method before it.",
)
@click.option("--tokens", default=65536, show_default=True, type=Count(64), help="Of the text.")
@click.option("--question", default=32, show_default=True, type=Count(1), help="Tokens of a question about it.")
@click.option("--turn", default=100, show_default=True, type=Count(1), help="Tokens of a turn.")
@click.option("--new", default=8, show_default=True, type=Count(1), help="Of each answer in `shared`.")
@click.option("--questions", default=16, show_default=True, type=Count(1), help="In `shared`.")
@click.option("--others", default=4, show_default=True, type=Count(1), help="Sequences that decode in `beside`.")
@click.option("--other-tokens", default=8192, show_default=True, type=Count(2), help="Of each of them.")
@click.option("--rounds", default=3, show_default=True, type=Count(1), help="Repetitions.")
@click.option("--pairs", default=50, show_default=True, type=Count(2), help="In `tenants`.")
@click.option("--gpu-kv", metavar="SIZE", help="The cap on GPU KV memory in `again` and `shared`.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def sessions(target: str | None, as_json: bool, **options: Any) -> None:
    """What is stored is not read twice.

    \b
    again    a second question about a text, and turns about it, beside the first reading
    shared   many questions about one text at once, beside texts of their own
    beside   steps of others while a turn is read, and while upkeep chooses again
    disk     a text that comes back from the disk, beside computing it
    tenants  the same prompt under two salts, by pairs
    """
    path = writable(target)
    asked = options["checks"].split(",")
    unknown = next((name for name in asked if name not in CHECKS), None)
    if unknown is not None:
        raise ConfigError(f"There is no check {unknown!r}.", f"There are: {', '.join(CHECKS)}.")

    from coattn.bench import sessions as bench_sessions
    from coattn.bench.reused import reusing
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.hf.random_model import random_model
    from coattn.method import compose
    from coattn.methods import find_method
    from coattn.provenance import provenance

    methods = _methods(options["methods"])
    for name, params in methods:
        compose(find_method(name), **params)  # refuses before the work
    cap = parse_bytes(options["gpu_kv"], "--gpu-kv")
    device = choose_device(options["device"])
    model = random_model(options["shapes"], device, choose_dtype(options["dtype"], device))
    same = ("tokens", "question", "turn", "new", "questions", "others", "other_tokens", "rounds", "pairs")
    rows: list[dict[str, Any]] = []
    made = {"rows": rows, "shapes": options["shapes"], "tokens": options["tokens"], "gpu_kv": cap}
    made |= {"simulated": ["random weights", "random tokens"], **provenance()}
    with tempfile.TemporaryDirectory() as folder:
        setting = bench_sessions.Setting(**{key: options[key] for key in same}, gpu_kv=cap)
        most = max(bench_sessions.mapped_bytes(model, check, setting) for check in asked)
        with reusing(most, device) as pieces:
            for i, (check, (name, params)) in enumerate(itertools.product(asked, methods)):
                if pieces is not None:
                    pieces.reset()
                try:
                    own = replace(setting, folder=f"{folder}/{i}", params=params)
                    found = bench_sessions.CHECKS[check](model, name, own)
                except CoattnError as error:
                    found = {"refused": str(error)}
                rows.append({"check": check, "method": name, "params": params, **found})
                _compare(rows)
                keep(path, **made)
                if not as_json:
                    show(rows[-1])
    save(path, made)
    if as_json:
        print_json(made)


def _methods(text: str) -> list[tuple[str, dict[str, Any]]]:
    """`full,cpu,window_blocks=2` -> each method with its parameters."""
    found: list[tuple[str, list[str]]] = []
    for word in text.split(","):
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"--methods begins with {word!r}.", "A parameter comes after the method that it is of.")
    return [(name, parse_settings(tuple(words))) for name, words in found]


def _compare(rows: list[dict[str, Any]]) -> None:
    """Turns beside those of `full`, where that ran before."""
    row = rows[-1]
    full = next((r for r in rows if r["check"] == "again" and r["method"] == "full" and "turn_median_s" in r), None)
    if full is not None and "turn_median_s" in row:
        row["turn_ratio"] = row["turn_median_s"] / full["turn_median_s"]


def show(row: dict[str, Any]) -> None:
    """A row for people."""
    table = Table(title=f"{row['check']}, {row['method']}", show_header=False)
    for name, value in row.items():
        if name not in ("check", "method"):
            table.add_row(name, _text(name, value))
    out.print(table)


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_text(name, each) for each in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if ("bytes" in name and "per_s" not in name) or name.endswith("_peak"):
        return format_bytes(int(value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
