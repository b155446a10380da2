"""`coattn models`: what can be fetched, and fetching it."""

from __future__ import annotations

import time
from dataclasses import asdict

import click
from rich.table import Table

from coattn.cli.options import json_option
from coattn.cli.output import err, model_progress, out, print_json
from coattn.units import format_bytes


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models that coattn can fetch by itself.

    Any local folder, GGUF file or hub name works wherever one of their names does.
    """
    if context.invoked_subcommand is not None:
        return
    from coattn.hf.models import list_models

    found = list_models()
    if as_json:
        print_json({"models": [asdict(info) for info in found]})
        return
    table = Table("model", "state", "size", "licence", "layers", "heads (query / KV)", "positions", "folder")
    for info in found:
        facts = info.facts
        heads = f"{facts.query_heads} / {facts.kv_heads}"
        row = (facts.licence, str(facts.layers), heads, f"{facts.positions:,}", str(info.path))
        table.add_row(info.name, info.state, format_bytes(info.bytes), *row)
    out.print(table)


@models.command("get")
@click.argument("name")
@click.option("--verify", is_flag=True, help="Read every file again and compare its hash.")
@json_option
def get(name: str, verify: bool, as_json: bool) -> None:
    """Fetch smollm2, check it and convert it once; or fetch a hub name (owner/model). A no-op when it is there."""
    from coattn.hf.models import get_model

    start = time.perf_counter()
    with model_progress() as show:
        path = get_model(name, verify=verify, on_progress=show)
    if as_json:
        print_json({"model": name, "path": str(path), "seconds": round(time.perf_counter() - start, 3)})
    else:
        err.print(f"{name} is ready ({time.perf_counter() - start:.1f} s).")
        click.echo(str(path))
