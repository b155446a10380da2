"""`coattn demo`: the point of the project in two minutes."""

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from coattn.cli.options import count_option, json_option, load_model, model_options
from coattn.cli.output import print_json, print_line, print_table, tell, writable
from coattn.progress import progress_line
from coattn.units import format_bytes


@click.command()
@model_options
@count_option("--tokens", 3000, "Length of the document in tokens.", 1500)
@count_option("--max-new-tokens", 24, "Longest answer in tokens.", 2)
@click.option("--out", "folder", default="demo", help="Write demo.json and demo.png to this folder.")
@json_option
def demo(tokens: int, max_new_tokens: int, folder: str, as_json: bool, **options: Any) -> None:
    """Ask seven methods about a fact in a long document, all but full with an eighth of the KV cache in GPU memory.

    The document is read once, and every method answers from the same keys and values. Exact methods give the answer of
    full attention, wherever the KV cache lies. Lossy methods attend to a part of it and may miss the fact. A picture
    shows where the KV cache lies and what each method attended to.
    """
    target = writable(str(Path(folder) / "demo.json"))
    assert target is not None
    tell("Loading the model. The first time it is fetched and converted, which takes about a minute.")

    from coattn.provenance import provenance
    from coattn.tools.demo.picture import draw
    from coattn.tools.demo.run import run_demo

    loaded = load_model(options)
    with progress_line() as stage:
        result = run_demo(loaded, tokens, max_new_tokens, stage)
    result |= {"model": loaded.name, "dtype": str(loaded.model.dtype).removeprefix("torch."), **provenance()}
    figure = target.with_suffix(".png")
    target.write_text(json.dumps(result, indent=2) + "\n")
    draw(result, figure)
    if as_json:
        print_json(result)
        return
    show_table(result)
    tell(f"wrote {target} and {figure}")


def show_table(result: dict[str, Any]) -> None:
    """The comparison, for people."""
    tokens, read_s = result["document_tokens"], result["read_s"]
    print_line(f"In a document of {tokens:,} tokens, read once in {read_s:.0f} s: “{result['fact']}”")
    print_line(f"Asked: “{result['question']}”")
    cap = f"{format_bytes(result['gpu_cap'])}, {result['gpu_share']:.1%} of the KV"
    columns = ("method", "", ">KV in GPU tier", ">KV in DRAM", ">attended", "found", "answer")
    rows = (
        (
            f"[bold]{row['method']}[/bold]",
            "exact" if row["exact"] else "lossy",
            *(f"{row[share]:.0%}" for share in ("gpu_share", "host_share", "attended")),
            "[green]yes[/green]" if row["found"] else "[red]no[/red]",
            escape(" ".join(row["answer"].split())),
        )
        for row in result["rows"]
    )
    print_table(columns, rows, f"GPU tier capped at {cap}; no cap for full", show_lines=True)
    print_line("attended: share of the document that a layer, head and step attends to, on average")
    for row in result["rows"]:
        if not row["found"]:
            print_line(f"{row['method']} {why(row, result)}")


def why(row: dict[str, Any], result: dict[str, Any]) -> str:
    """What a miss means, in one sentence."""
    if not any(other["found"] for other in result["rows"] if other["exact"]):
        return "missed it as full attention does: the model is too weak for this question."
    if row["exact"]:
        return "is exact but for rounding, and yet missed it: please report this."
    if not row["fact_kept"]:
        return "missed it for good: nothing of the fact is left in either tier."
    return (
        f"missed it: the fact is in memory, but on average {row['fact_attended']:.0%} of layers and heads attended to "
        "its tokens, too few or the wrong ones. The next question may find it."
    )
