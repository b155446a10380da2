"""`coattn sessions`: lists and deletes saved sessions."""

from datetime import datetime

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_table, tell
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
        tell(f"No session is saved in {saved.folder}.")
        return
    times = (f"{datetime.fromtimestamp(stat.st_mtime):%Y-%m-%d %H:%M}" for _, stat in found)
    sizes = ((name, format_bytes(stat.st_size)) for name, stat in found)
    print_table(("session", "size", "saved"), ((*one, at) for one, at in zip(sizes, times, strict=True)))


@sessions.command("delete")
@click.argument("name")
def delete(name: str) -> None:
    """Delete a saved session."""
    from coattn.engine.session_file import Sessions

    Sessions().delete(name)
    tell(f"{name} is deleted.")
