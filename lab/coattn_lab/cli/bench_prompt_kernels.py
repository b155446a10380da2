"""`coattn-lab bench prompt-kernels`: who attends to a prompt's chunk fastest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import numbers
from coattn.cli.options import json_option
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn_lab.cli.groups import bench


def chunk_sizes(value: str) -> list[int | None]:
    """`"2048,whole"` -> `[2048, None]`."""
    found: list[int | None] = []
    for part in value.split(","):
        if part != "whole" and not (part.isdigit() and int(part) > 0):
            raise ConfigError(f"{part!r} is not a chunk.", "Write tokens or `whole`, with commas, like 2048,whole.")
        found.append(None if part == "whole" else int(part))
    return found


@bench.command("prompt-kernels")
@click.option(
    "--shapes", default="qwen3-8b,llama-3-8b", show_default=True, help="Model shapes by name; like heads are run once."
)
@click.option("--contexts", default="32768,131072", show_default=True, callback=numbers, help="Tokens of a prompt.")
@click.option("--chunks", default="2048,8192,whole", show_default=True, help="Tokens per step, or `whole`.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def prompt_kernels(target: str | None, as_json: bool, **options: Any) -> None:
    """Attention of the last chunk of a prompt: TFLOP/s of each kernel, and its difference from plain float32."""
    path = writable(target)

    from coattn.hf.load import choose_device, choose_dtype
    from coattn.hf.random_model import heads_of
    from coattn.kernels.prompt.mask import Shape
    from coattn.provenance import provenance
    from coattn_lab.bench import prompt_kernels as kernels

    device = choose_device(options["device"])
    dtype = choose_dtype(options["dtype"], device)
    chunks = chunk_sizes(options["chunks"])
    heads: dict[tuple[int, int, int], list[str]] = {}
    for name in options["shapes"].split(","):
        heads.setdefault(heads_of(name), []).append(name)
    rows: list[dict[str, Any]] = []
    with progress("kernels", None) as bar:
        for (q_heads, kv_heads, head_dim), names in heads.items():
            shape = Shape(device, dtype, q_heads, kv_heads, head_dim, 1, 1)
            for made in kernels.run(shape, options["contexts"], chunks):
                rows.append({"shapes": ", ".join(names), **asdict(made)})
                keep(path, rows=rows)
                bar.advance(bar.task_ids[0])
    result = {"rows": rows, "simulated": ["random queries, keys and values"], **provenance()}
    save(path, result)
    if as_json:
        print_json(result)
        return
    table = Table(title="attention of the last chunk of a prompt")
    for name in ("shapes", "context", "chunk", "kernel", "TFLOP/s", "ms", "first ms", "lse error", "error", "refused"):
        table.add_column(name, justify="left" if name in ("shapes", "kernel", "refused") else "right")
    for row in rows:
        figures = [
            ("tflops", ".3g"), ("ms", ",.2f"), ("first_ms", ",.0f"), ("lse_error", ".1e"), ("out_error", ".1e")
        ]  # fmt: skip
        table.add_row(
            row["shapes"], f"{row['context']:,}", f"{row['chunk']:,}", row["kernel"],
            *("" if row[name] is None else format(row[name], form) for name, form in figures), row["refused"] or "",
        )  # fmt: skip
    out.print(table)
