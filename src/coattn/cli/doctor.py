"""`coattn doctor`: what this machine has, what will be used and why."""

from __future__ import annotations

import click
from rich.table import Table

from coattn.cli.options import json_option
from coattn.cli.output import out, print_json


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show GPU, cores, instruction sets and memory, what coattn will use of them and why, and hints."""
    from coattn.plan.machine import examine

    found = examine()
    if as_json:
        print_json(found)
        return
    table = Table(title="This machine", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in found["machine"].items():
        table.add_row(name.replace("_", " "), "none" if value is None else str(value))
    out.print(table)
    use = Table("part", "what will be used", "why", title="What coattn will use")
    for row in found["uses"]:
        use.add_row(row["part"], row["choice"], row["reason"])
    out.print(use)
    for hint in found["hints"]:
        out.print(f"hint: {hint}", highlight=False)
