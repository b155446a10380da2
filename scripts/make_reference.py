"""Write docs/reference/*.md and the README's table of methods from the code; with --check, only say what is stale.

Usage: python scripts/make_reference.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from coattn.cli.main import cli
from coattn.cli.methods import describe
from coattn.method import ORIGIN
from coattn.methods import METHODS
from coattn.ops.blockwise import HELP
from coattn.parts import PARTS

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
"""Columns of a help page, whatever the terminal."""
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"
MADE = "<!-- Made by scripts/make_reference.py (`make docs`). Do not edit. -->"


def main() -> None:
    """Writes what is stale, or with --check exits with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is stale")
    check = parser.parse_args().check
    found = stale(ROOT)
    for name, text in found.items():
        if check:
            print(f"{name} is stale: run `make docs`.", file=sys.stderr)
        else:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    sys.exit(1 if check and found else 0)


def stale(root: Path) -> dict[str, str]:
    """Files under `root` that are not as the code says: name -> what it should be."""
    pages = {
        "README.md": fill(_read(root / "README.md"), methods_table()),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/methods.md": methods_page(),
    }
    return {name: text for name, text in pages.items() if _read(root / name) != text}


def fill(readme: str, table: str) -> str:
    """The README with `table` between its markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise SystemExit(f"README.md must hold {BEGIN} and {END}, once each, in this order.")
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n{table}{END}{after}"


def methods_table() -> str:
    """Every row of the table in one line."""
    rows = [
        (
            f"`{method.name}`",
            "yes" if describe(method)["exact"] else "no",
            method.store,
            method.select,
            " + ".join(method.place),
            method.schedule,
            method.summary,
        )
        for method in METHODS.values()
    ]
    return table(("method", "exact", "store", "select", "place", "schedule", "what it does"), rows)


def cli_page() -> str:
    """The help page of every command."""
    parts = ["# Command line\n", MADE, "\nEach section is what `--help` prints.\n"]
    for name, text in help_pages(cli, "coattn", None):
        parts.append(f"## `{name}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def help_pages(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """`(full name, help)` of a command and of all its subcommands."""
    context = command.make_context(name, [], parent, resilient_parsing=True, terminal_width=WIDTH)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group) and command.invoke_without_command:
        # click 8.1 leaves the brackets out
        text = text.replace("[OPTIONS] COMMAND [ARGS]...", "[OPTIONS] [COMMAND] [ARGS]...")
    yield context.command_path, text
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            child = command.get_command(context, sub)
            if child is not None and not child.hidden:
                yield from help_pages(child, sub, context)


def methods_page() -> str:
    """Every row in full, then every part, then what needs mean."""
    parts = ["# Methods and parts\n", MADE, "\nA method is a row: one part per axis. See [concepts](../concepts.md).\n"]
    parts += [_method_section(name) for name in METHODS]
    rows = [(f"`{name}`", "unset", text) for name, text in HELP.items()]
    parts.append("## Parameters of every method\n\n" + table(("parameter", "default", "meaning"), rows))
    parts.append("## Parts\n\nWhat a row may name on each axis. A row of your own may mix them as far as they fit.\n")
    for axis, kinds in PARTS.items():
        rows = [
            (
                f"`{name}`",
                (kind.__doc__ or "").strip().splitlines()[0],
                _names(kind.needs),
                _names(kind.provides),
                _names(kind.parameters()),
            )
            for name, kind in kinds.items()
        ]
        parts.append(f"### {axis}\n\n" + table(("part", "what it does", "needs", "provides", "parameters"), rows))
    parts.append(
        "## What the needs mean\n\n" + table(("need", "is met by"), [(f"`{k}`", v) for k, v in ORIGIN.items()])
    )
    return "\n".join(parts)


def _method_section(name: str) -> str:
    row = describe(METHODS[name])
    lines = [f"## `{name}`\n", f"{row['summary']}\n"]
    lines.append(f"- Exact: {'yes, equals full attention' if row['exact'] else 'no'}.")
    if row["paper"]:
        lines.append(f"- Paper: {row['paper']}.")
    lines += [f"- {part['axis'].capitalize()} `{part['name']}`: {part['does']}" for part in row["parts"]]
    rows = [
        (f"`{key}`", "unset" if param["value"] is None else f"`{param['value']}`", param["help"])
        for key, param in row["params"].items()
    ]
    lines.append("\n" + table(("parameter", "default", "meaning"), rows))
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
