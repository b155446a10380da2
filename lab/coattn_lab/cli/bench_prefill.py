"""`coattn-lab bench prefill`: reading a long prompt, with and without a cap."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import click

from coattn.cli.options import Count, json_option
from coattn.cli.output import out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_bytes
from coattn_lab.cli.groups import bench, empty_table


@bench.command()
@click.option(
    "--shapes",
    default="qwen3-8b",
    show_default=True,
    help="Model shapes by name, with commas; `NAME:int4` packs the layers' weights. The weights are random.",
)
@click.option(
    "--methods",
    default="offload",
    show_default=True,
    help="Methods to run under the cap, with commas; `transformers` is plain Transformers, the prompt in one call.",
)
@click.option("--tokens", default=32768, show_default=True, type=Count(2), help="Length of the prompt.")
@click.option("--chunk", default="4096", show_default=True, help="Tokens per step, or `whole`; several with commas.")
@click.option("--gpu-kv", default="2GiB", show_default=True, metavar="SIZE", help="The cap on GPU KV memory, or none.")
@click.option("--floor", is_flag=True, help="Also the least time, by rates of products and attention measured here.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def prefill(target: str | None, as_json: bool, **options: Any) -> None:
    """A prompt under each method with a cap on GPU memory, beside `full` without one: time, and the same answer.

    Of several shapes, times are ratios of the first one's: `--shapes llama-3.1-8b-instruct,llama-3.1-8b-instruct:int4`.
    """
    path = writable(target)

    import torch

    from coattn.hf.load import choose_device, choose_dtype
    from coattn.method.table import find_method
    from coattn.provenance import provenance
    from coattn_lab.bench import prefill as bench_prefill
    from coattn_lab.bench.random_model import random_model

    tokens = options["tokens"]
    chunks = [tokens if size is None else min(size, tokens) for size in chunk_sizes(options["chunk"])]
    cap = None if options["gpu_kv"] == "none" else parse_bytes(options["gpu_kv"], "--gpu-kv")
    names = options["methods"].split(",")
    cases = [bench_prefill.Case(bench_prefill.PEER, None, tokens)] if bench_prefill.PEER in names else []
    for chunk in chunks:
        cases.append(bench_prefill.Case("full", None, chunk))
        for name in names:
            if name not in (bench_prefill.PEER, "full"):
                cases.append(bench_prefill.Case(find_method(name).name, cap, chunk))
    device = choose_device(options["device"])
    rows: list[dict[str, Any]] = []
    every = options["shapes"].split(",")
    with progress("prefill", len(cases) * len(every)) as bar:
        for shapes in every:
            model = random_model(shapes, device, choose_dtype(options["dtype"], device))
            floor = bench_prefill.floor_s(model, tokens) if options["floor"] else None
            than = rows[0]["seconds"] if rows else None
            for made in bench_prefill.run(model, cases, tokens, floor, than):
                rows.append({"shapes": shapes, **asdict(made)})
                bar.advance(bar.task_ids[0])
            del model
            gc.collect()  # the next one has room
            if device.type == "cuda":
                torch.cuda.empty_cache()
    result = {"rows": rows, "shapes": options["shapes"], "simulated": ["random weights", "random tokens"]}
    result |= provenance()
    save(path, result)
    if as_json:
        print_json(result)
        return
    title = f"{options['shapes']}, a prompt of {options['tokens']:,} tokens"
    heads = "chunk | cap | seconds | tokens/s | x first | x floor | KL | same top | GPU KV | DRAM KV"
    table = empty_table(title, "method", heads)
    for row in rows:
        name = f"{row['shapes']} {row['method']}" if len(every) > 1 else row["method"]
        if row["refused"]:
            table.add_row(name, f"{row['chunk']:,}", "", row["refused"])
            continue
        table.add_row(
            name, f"{row['chunk']:,}",
            "none" if row["gpu_kv"] is None else format_bytes(row["gpu_kv"]),
            f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}",
            "" if row["floor_ratio"] is None else f"{row['floor_ratio']:.2f}", f"{row['kl']:.1e}",
            "yes" if row["same_top"] else "no", format_bytes(row["gpu_kv_peak"]), format_bytes(row["host_kv_peak"]),
        )  # fmt: skip
    out.print(table)


def chunk_sizes(value: str) -> list[int | None]:
    """`"2048,whole"` -> `[2048, None]`."""
    found: list[int | None] = []
    for part in value.split(","):
        if part != "whole" and not (part.isdigit() and int(part) > 0):
            raise ConfigError(f"{part!r} is not a chunk.", "Write tokens or `whole`, with commas, like 2048,whole.")
        found.append(None if part == "whole" else int(part))
    return found
