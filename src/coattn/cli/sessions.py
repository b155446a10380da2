"""`coattn sessions`: lists and deletes saved sessions."""

from __future__ import annotations

from datetime import datetime

import click
from rich.table import Table

from coattn.cli.options import json_option
from coattn.cli.output import err, out, print_json
from coattn.units import format_bytes


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def sessions(context: click.Context, as_json: bool) -> None:
    """List the saved sessions. `coattn chat --session NAME` continues one."""
    if context.invoked_subcommand is not None:
        return
    from coattn.engine.session_file import Sessions

    saved = Sessions()
    found = [(name, saved.path(name).stat()) for name in saved.names()]
    if as_json:
        rows = [{"name": name, "bytes": stat.st_size, "saved": stat.st_mtime} for name, stat in found]
        print_json({"folder": str(saved.folder), "sessions": rows})
        return
    if not found:
        err.print(f"No session is saved in {saved.folder}.", soft_wrap=True, highlight=False)
        return
    table = Table("session", "size", "saved")
    for name, stat in found:
        table.add_row(name, format_bytes(stat.st_size), f"{datetime.fromtimestamp(stat.st_mtime):%Y-%m-%d %H:%M}")
    out.print(table)


@sessions.command("delete")
@click.argument("name")
def delete(name: str) -> None:
    """Delete a saved session."""
    from coattn.engine.session_file import Sessions

    Sessions().delete(name)
    err.print(f"{name} is deleted.")
