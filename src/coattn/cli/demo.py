"""`coattn demo`: the point of the project in a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from coattn.cli.options import json_option, model_options
from coattn.cli.output import err, model_progress, out, print_json, writable
from coattn.units import format_bytes


@click.command()
@model_options
@click.option("--tokens", default=4000, show_default=True, type=click.IntRange(512), help="Length of the document.")
@click.option("--max-new-tokens", default=24, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--out", "folder", default="demo", show_default=True, help="Folder for demo.json and demo.png.")
@json_option
def demo(model: str, dtype: str, device: str, tokens: int, max_new_tokens: int, folder: str, as_json: bool) -> None:
    """Ask about a fact in a long document under four methods, three of them with an eighth of the KV in the GPU tier.

    The exact methods answer although almost all of the KV is elsewhere; the one that forgets may not.
    """
    target = writable(str(Path(folder) / "demo.json"))
    assert target is not None
    err.print("Loading the model; the first time it is fetched and converted, which takes about a minute.")

    from coattn.demo import draw, run_demo
    from coattn.hf.load import load
    from coattn.provenance import provenance

    with model_progress() as show:
        loaded = load(model, dtype=dtype, device=device, on_progress=show)
    with err.status("starting") as status:
        result = run_demo(loaded, tokens, max_new_tokens, lambda name: status.update(f"{name} ..."))
    result |= {"model": loaded.name, "dtype": str(loaded.model.dtype).removeprefix("torch."), **provenance()}
    target.write_text(json.dumps(result, indent=2) + "\n")
    figure = target.with_suffix(".png")
    draw(result, figure)
    if as_json:
        print_json(result)
        return
    show_table(result)
    err.print(f"wrote {target} and {figure}")


def show_table(result: dict[str, Any]) -> None:
    """The comparison, for people."""
    out.print(f"Planted in a document of {result['document_tokens']:,} tokens: “{result['fact']}”")
    out.print(f"Asked: “{result['question']}”")
    title = f"GPU tier capped at {format_bytes(result['gpu_cap'])}, an eighth of the KV (full: no cap)"
    table = Table(title=title)
    for name in (
        "method",
        "exact",
        "KV in GPU tier",
        "KV in DRAM",
        "reading",
        "tokens/s",
        "answer",
        "found",
        "agrees with full",
    ):
        table.add_column(name, justify="left" if name in ("method", "answer") else "right")
    for row in result["rows"]:
        speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        table.add_row(
            row["method"],
            "yes" if row["exact"] else "no",
            format_bytes(row["gpu_kv"]),
            format_bytes(row["host_kv"]),
            f"{row['prefill_s']:.1f} s",
            speed,
            row["answer"][:60],
            "[green]yes[/green]" if row["found"] else "[red]no[/red]",
            f"{row['agreement']:.0%}",
        )
    out.print(table)
