"""`coattn bench prefill`: reading a long prompt, with and without a cap."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import bench
from coattn.cli.options import Count, json_option
from coattn.cli.output import out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_bytes


@bench.command()
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--methods", default="offload", show_default=True, help="Methods to run under the cap, with commas.")
@click.option("--tokens", default=32768, show_default=True, type=Count(2), help="Length of the prompt.")
@click.option("--chunk", default=4096, show_default=True, type=Count(1), help="Tokens per step.")
@click.option("--gpu-kv", default="2GiB", show_default=True, metavar="SIZE", help="The cap on GPU KV memory.")
@click.option("--rounding", is_flag=True, help="Add `full` in chunks half as long: how far rounding alone carries.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def prefill(target: str | None, as_json: bool, **options: Any) -> None:
    """A prompt under each method with a cap on GPU memory, beside `full` without one: time, and the same answer."""
    path = writable(target)

    from coattn.bench import prefill as bench_prefill
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.hf.random_model import random_model
    from coattn.methods import find_method
    from coattn.provenance import provenance

    if 2 * options["chunk"] > options["tokens"]:
        raise ConfigError("The prompt has less than two chunks.", "Raise --tokens or lower --chunk.")
    cap = parse_bytes(options["gpu_kv"], "--gpu-kv")
    names = options["methods"].split(",")
    chunk = options["chunk"]
    cases = [bench_prefill.Case("full", None, chunk)]
    if options["rounding"]:
        cases.append(bench_prefill.Case("full", None, max(1, chunk // 2)))
    cases += [bench_prefill.Case(find_method(name).name, cap, chunk) for name in names]
    device = choose_device(options["device"])
    model = random_model(options["shapes"], device, choose_dtype(options["dtype"], device))
    rows = []
    with progress("prefill", len(cases)) as bar:
        for made in bench_prefill.run(model, cases, options["tokens"]):
            rows.append(asdict(made))
            bar.advance(bar.task_ids[0])
    result = {"rows": rows, "shapes": options["shapes"], "simulated": ["random weights", "random tokens"]}
    result |= provenance()
    save(path, result)
    if as_json:
        print_json(result)
        return
    table = Table(title=f"{options['shapes']}, a prompt of {options['tokens']:,} tokens")
    for name in ("method", "chunk", "cap", "seconds", "tokens/s", "x first", "KL", "same top", "GPU KV", "DRAM KV"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"], f"{row['chunk']:,}",
            "none" if row["gpu_kv"] is None else format_bytes(row["gpu_kv"]),
            f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}", f"{row['kl']:.1e}",
            "yes" if row["same_top"] else "no", format_bytes(row["gpu_kv_peak"]), format_bytes(row["host_kv_peak"]),
        )  # fmt: skip
    out.print(table)
