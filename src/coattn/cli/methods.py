"""`coattn methods`: the table, and one row explained."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.options import json_option
from coattn.cli.output import out, print_json


@click.command()
@click.argument("name", required=False)
@json_option
def methods(name: str | None, as_json: bool) -> None:
    """List the methods, or explain one.

    NAME is a method of the table, or a TOML file with rows of your own (rows.toml or rows.toml:name).
    """
    from coattn.methods import METHODS, find_method

    if name is not None:
        explain(describe(find_method(name)), as_json)
        return
    rows = [describe(method) for method in METHODS.values()]
    if as_json:
        print_json({"methods": rows})
        return
    table = Table(title="Methods: one part per axis")
    for column in ("method", "exact", "store", "select", "place", "schedule", "what it does"):
        table.add_column(column)
    for row in rows:
        exact = "yes" if row["exact"] else "no"
        table.add_row(
            row["name"], exact, row["store"], row["select"], " + ".join(row["place"]), row["schedule"], row["summary"]
        )
    out.print(table)
    out.print("`coattn methods NAME` explains one. A TOML file with a row of your own works wherever a name does.")


def describe(method: Any) -> dict[str, Any]:
    """A row as data: parts, parameters with defaults and meaning, needs and provides."""
    from coattn.method import compose
    from coattn.parts import PARTS

    composed = compose(method)
    kinds = [PARTS[axis][part] for axis, part in method.parts()]
    texts = {key: text for kind in kinds for key, text in kind.help_text.items()}
    return {
        "name": method.name,
        "exact": composed.exact,
        "summary": method.summary,
        "paper": method.paper,
        "store": method.store,
        "select": method.select,
        "place": list(method.place),
        "schedule": method.schedule,
        "params": {key: {"value": value, "help": texts.get(key, "")} for key, value in composed.params.items()},
        "parts": [
            {
                "axis": kind.axis,
                "name": kind.name,
                "does": (kind.__doc__ or "").strip().splitlines()[0],
                "needs": sorted(kind.needs),
                "provides": sorted(kind.provides),
            }
            for kind in kinds
        ],
    }


def explain(row: dict[str, Any], as_json: bool) -> None:
    """One row, in full."""
    if as_json:
        print_json(row)
        return
    out.print(f"[bold]{row['name']}[/bold]: {row['summary']}")
    out.print(f"exact: {'yes, equals full attention' if row['exact'] else 'no'}")
    if row["paper"]:
        out.print(f"paper: {row['paper']}")
    parts = Table("axis", "part", "what it does", "needs", "provides")
    for part in row["parts"]:
        parts.add_row(part["axis"], part["name"], part["does"], ", ".join(part["needs"]), ", ".join(part["provides"]))
    out.print(parts)
    params = Table("parameter", "value", "meaning")
    for key, param in row["params"].items():
        params.add_row(key, "" if param["value"] is None else str(param["value"]), param["help"])
    from coattn.ops.blockwise import HELP

    for key, text in HELP.items():
        params.add_row(key, "", text)
    out.print(params)
