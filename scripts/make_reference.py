"""Write docs/reference/*.md and the generated parts of other pages from the code; with --check, only say what is stale.

Usage: python scripts/make_reference.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

import coattn
from coattn import errors
from coattn.cli.main import cli
from coattn.cli.methods import describe
from coattn.method.registry import PARTS, registry
from coattn.method.row import Method
from coattn.method.table import METHODS
from coattn.part import Part
from coattn.parts.method import AXES
from coattn.step.runtime import Runtime

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
"""Columns of a help page, whatever the terminal."""
IN_README = ("hgca", "scout", "hcattention", "auto")
"""Lossy rows with a line of their own in the README."""
IN_PYTHON = (
    "engine.request.RequestOutput", "engine.handle.Handle", "engine.session.Session",
    "hf.attach.Attachment", "hf.load.load", "hf.load.Loaded", "hf.prefilled.prefill", "hf.prefilled.Prefilled",
)  # fmt: skip
"""What one gets from the names of `coattn`, or gives to them."""
INTERNAL = (
    "fingerprints", "take", "submit_whole", "whole", "before_forward", "after_forward",
    "prepare_cache",
)  # fmt: skip
"""Methods that another room calls."""
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
        "README.md": fill(root, "README.md", methods=methods_list()),
        "docs/step.md": fill(root, "docs/step.md", step=step_source()),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/methods.md": methods_page(),
        "docs/reference/python.md": python_page(),
    }
    return {name: text for name, text in pages.items() if _read(root / name) != text}


def fill(root: Path, name: str, **parts: str) -> str:
    """A page with each of `parts` between the markers of its name."""
    text = _read(root / name)
    for part, body in parts.items():
        begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(f"{name} must hold {begin} and {end}, once each, in this order.")
        text = f"{text.split(begin)[0]}{begin}\n{body}{end}{text.split(end)[1]}"
    return text


def methods_list() -> str:
    """The exact rows, those of the three papers and our own in a few words, for the README; the others by name."""
    rows, others = [], []
    for row in METHODS.values():
        if row.summary.startswith("Lossy, for evaluation.") or row.variant_of:
            continue
        if _exact(row) == "yes" or row.name in IN_README:
            # the column before says it already
            summary = row.summary.removeprefix("Exact. ").removeprefix("Lossy. ")
            rows.append((f"`{row.name}`", _exact(row), summary))
        else:
            others.append(f"`{row.name}`")
    named = f"{', '.join(others[:-1])} and {others[-1]}"
    listed = table(("method", "exact", "what it does"), rows)
    return f"{listed}\nTo compare with: {named}. [All rows](docs/reference/methods.md).\n"


def step_source() -> str:
    """The decode step as the runtime has it."""
    return f"```python\n{textwrap.dedent(inspect.getsource(Runtime.decode))}```\n"


def methods_table() -> str:
    """Every row of the table in one line."""
    rows = [
        (f"`{method.name}`", _exact(method), *(part for _, part in method.parts()), method.summary)
        for method in METHODS.values()
    ]
    return table(("method", "exact", *AXES, "what it does"), rows)


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
    parts.append(methods_table())
    parts += [_method_section(name) for name in METHODS]
    hidden = {name for row in METHODS.values() for name in row.internal}
    hidden -= {name for row in METHODS.values() for name in describe(row)["params"]}
    parts.append("## Parts\n\nWhat a row may name on each axis. A row of your own may mix them as far as they fit.\n")
    for axis, kinds in PARTS.items():
        rows = [
            (
                f"`{name}`",
                _does(kind),
                _names(kind.needs),
                _names(kind.provides),
                _names(kind.parameters().keys() - hidden),
            )
            for name, kind in kinds.items()
        ]
        parts.append(f"### {axis}\n\n" + table(("part", "what it does", "needs", "provides", "parameters"), rows))
    parts.append(
        "## What the needs mean\n\n"
        + table(("need", "is met by"), [(f"`{k}`", v) for k, v in registry().needs.items()])
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


def python_page() -> str:
    """What `import coattn` gives, by its signatures and docstrings."""
    names = [f"coattn.{name}" for name in coattn._LAZY]
    parts = ["# Python reference\n", MADE, "\nWhat `import coattn` gives comes first, then what that returns.\n"]
    parts += [_python_section(name) for name in (*names, *(f"coattn.{name}" for name in IN_PYTHON))]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    rows = [(f"`{kind.__name__}`", f"`{kind.__base__.__name__}`", _does(kind)) for kind in kinds]
    parts.append("## Errors\n\nAll are in `coattn.errors` and have `sentence` and `hint`.\n")
    return "\n".join([*parts, table(("error", "based on", "is raised for"), rows)])


def _python_section(name: str) -> str:
    module, _, last = name.rpartition(".")
    what: Any = getattr(importlib.import_module(module), last)
    lines = [f"## `{name}`\n"]
    if not isinstance(what, type):
        return "\n".join([*lines, _signature(last, what), _listed(what)])
    if dataclasses.is_dataclass(what):
        said = _field_docs(what)
        rows = [(f"`{each.name}`", f"`{each.type}`", said.get(each.name, "")) for each in dataclasses.fields(what)]
        lines += [_listed(what), table(("field", "type", "meaning"), rows)]
    else:
        lines += [_signature(last, what), _listed(what)]
    for method, code in vars(what).items():
        if inspect.isfunction(code) and code.__doc__ and not method.startswith("_") and method not in INTERNAL:
            lines += [f"### `{last}.{method}`\n", _signature(method, code), _listed(code)]
    return "\n".join(lines)


def _signature(name: str, what: Any) -> str:
    """One parameter a line, without `self`."""
    called = inspect.signature(what)
    given = [str(param) for key, param in called.parameters.items() if key != "self"]
    named = [str(param) for param in called.parameters.values() if param.kind is param.KEYWORD_ONLY]
    if named:
        given.insert(given.index(named[0]), "*")
    back = "" if isinstance(what, type) else f" -> {called.return_annotation}"
    inside = "".join(f"    {param},\n" for param in given)
    text = f"{name}(\n{inside}){back}" if given else f"{name}(){back}"
    text = re.sub(r"<function .*? at 0x\w+>", "...", text)
    return "```python\n" + re.sub(r"(: |-> )'([^']*)'", r"\1\2", text) + "\n```\n"


def _listed(what: Any) -> str:
    """A docstring as Markdown: `name: text` of a parameter is an entry of a list."""
    return re.sub(r"(?m)^(\w+(?:, \w+)*): ", r"- `\1`: ", inspect.getdoc(what) or "") + "\n"


def _field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(said.value.value.split())
        for field, said in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _exact(method: Method) -> str:
    return "yes" if describe(method)["exact"] else "no"


def _does(kind: type[Part]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    main()
