"""`coattn methods`: the table, and one row explained."""

from dataclasses import asdict
from typing import Any

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_line, print_table, progress, tell
from coattn.errors import CoattnError, ConfigError

HINT = """`coattn methods NAME` explains one, and says what it is made of.
Wherever a name works, a TOML file with a row of your own does, too."""


@click.command()
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="Run NAME on small random tensors and compare it with full attention.")
@json_option
def methods(name: str | None, check: bool, as_json: bool) -> None:
    """List the methods, or explain one.

    NAME is a method of the table, or a TOML file with methods of your own (rows.toml or rows.toml:name). --check runs
    prompts, decode steps, turns and removed tokens, once with parameters that attend to everything and once with the
    method's own. The exit code is 1 if the method is not what it declares.
    """
    from coattn.method.registry import METHODS, registry
    from coattn.method.table import find_method

    if check:
        if name is None:
            raise ConfigError(
                "--check needs the name of a method.", "Give one, such as `coattn methods rows.toml:mine --check`."
            )
        run_check(find_method(name), as_json)
        return
    if name is not None:
        explain(describe(find_method(name)), as_json)
        return
    rows, unavailable = [], [f"{failure} {failure.hint}" for failure in registry().failures]
    for method in METHODS.values():
        try:
            rows.append(describe(method))
        except CoattnError as error:
            unavailable.append(f"{error} {error.hint}")
    parts = [
        {"axis": kind, "name": name, "package": package}
        for (kind, name), package in registry().packages.items()
        if kind != "method"
    ]
    if as_json:
        print_json({"methods": rows, "parts_from_packages": parts, "unavailable": unavailable})
        return
    lines = []
    for row in rows:
        text = row["summary"].removeprefix("Exact. ").removeprefix("Lossy. ")
        text += f" From package {row['package']}." if row["package"] else ""
        lines.append((row["name"], "yes" if row["exact"] else "no", text))
    print_table(("method", "exact", "what it does"), lines)
    for part in parts:
        print_line(f"From package {part['package']}: {part['axis']} {part['name']}.")
    for text in unavailable:
        tell(f"warning: {text}")
    print_line(HINT)


def run_check(method: Any, as_json: bool) -> None:
    """Runs a row and says what was found."""
    from coattn.step.check import check

    with progress(f"running {method.name}", None):
        verdict = check(method)
    if as_json:
        print_json(asdict(verdict))
    else:
        runs = (("nothing left out", verdict.whole, verdict.equal), ("as it stands", None, verdict.own))
        lines = []
        for what, params, run in runs:
            if run is not None:
                words = ", ".join(f"{k}={v}" for k, v in (params or {}).items()) or "its own"
                allowed = "" if run.most is None else f"{run.most:,}"
                lines.append((what, words, f"{run.error:.2g}", f"{run.attended:,}", f"{run.stored:,}", allowed))
        columns = ("run", "parameters", "largest difference from full attention", "attended", "of", "allowed")
        print_table(columns, lines)
        print_line(f"{method.name} says: {'exact, equals full attention' if verdict.exact else 'lossy'}")
        if verdict.whole is None:
            print_line("A part names no parameters under which it leaves nothing out, so equality was not tried.")
        for line in [f"problem: {problem}" for problem in verdict.problems] or ["No problem was found."]:
            print_line(line)
    if verdict.problems:
        raise SystemExit(1)


def describe(method: Any) -> dict[str, Any]:
    """A row as data: parts, parameters with defaults and meaning, needs and provides."""
    from coattn.method.registry import METHODS, registry
    from coattn.method.row import compose, find_parts

    composed, kinds = compose(method), find_parts(method)
    registered = METHODS.get(method.name) is method
    texts = {key: text for kind in kinds for key, text in kind.help_text.items()}
    return {
        "name": method.name,
        "exact": composed.exact,
        "summary": method.summary,
        "paper": method.paper,
        "variant_of": method.variant_of,
        "package": registry().packages.get(("method", method.name)) if registered else None,
        **dict(method.parts()),
        "params": {
            key: {"value": value, "help": texts.get(key, "")}
            for key, value in composed.params.items()
            if key not in method.internal
        },
        "parts": [
            {
                "axis": kind.axis,
                "name": kind.name,
                "does": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
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
    print_line(f"{row['name']}: {row['summary']}")
    print_line(f"exact: {'yes, equals full attention' if row['exact'] else 'no'}")
    for key in ("package", "paper"):
        if row[key]:
            print_line(f"{key}: {row[key]}")
    parts = (
        (part["axis"], part["name"], part["does"], ", ".join(part["needs"]), ", ".join(part["provides"]))
        for part in row["parts"]
    )
    print_table(("axis", "part", "what it does", "needs", "provides"), parts)
    params = [(key, param["value"], param["help"]) for key, param in row["params"].items()]
    lines = ((key, "" if value is None else str(value), text) for key, value, text in params)
    print_table(("parameter", "value", "meaning"), lines)
