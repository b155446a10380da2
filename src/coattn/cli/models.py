"""`coattn models`: what can be fetched, and fetching it."""

import time

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_table, tell
from coattn.progress import progress_line
from coattn.units import format_bytes


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models that coattn can fetch by itself.

    Every --model option also takes a local folder, a GGUF file or a name on the Hugging Face hub.
    """
    if context.invoked_subcommand is not None:
        return
    from coattn.hf.models import list_models

    found = list_models()
    if as_json:
        print_json({"models": found})
        return
    rows = ((x["name"], x["state"], format_bytes(x["bytes"]), x["licence"], str(x["path"])) for x in found)
    print_table(("model", "state", "size", "licence", "folder"), rows)


@models.command("get")
@click.argument("name")
@json_option
def get(name: str, as_json: bool) -> None:
    """Fetch NAME and check it: smollm2, which is also converted, or a hub name (owner/model).

    Does nothing if the model is already there.
    """
    from coattn.hf.models import get_model

    start = time.perf_counter()
    with progress_line(f"{name}: ") as show:
        path = get_model(name, on_progress=show)
    if as_json:
        print_json({"model": name, "path": str(path), "seconds": round(time.perf_counter() - start, 3)})
    else:
        tell(f"{name} is ready ({time.perf_counter() - start:.1f} s).")
        click.echo(str(path))
