"""`coattn bench beside`: decoding while a long prompt is read."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.bench import bench
from coattn.cli.options import Count, Number, json_option
from coattn.cli.output import out, print_json, save, writable
from coattn.errors import CoattnError


@bench.command()
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--methods", default="full", show_default=True, help="With commas.")
@click.option("--batch", default=8, show_default=True, type=Count(1), help="Sequences that decode.")
@click.option("--context", default=16384, show_default=True, type=Count(2), help="Tokens of each.")
@click.option("--tokens", default=65536, show_default=True, type=Count(2), help="Of the prompt that is read meanwhile.")
@click.option("--gpu-kv", metavar="SIZE", help="The cap on GPU KV memory.")
@click.option("--chunk", type=Count(1), help="Prompt tokens of a step; default: set by --target-ms.")
@click.option("--target-ms", type=Number(0, min_open=True), help="Most time between two tokens while it is read.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def beside(target: str | None, as_json: bool, **options: Any) -> None:
    """Time between tokens with and without a prompt that is read meanwhile, and what the prompt itself takes."""
    path = writable(target)

    from coattn.bench import beside as bench_beside
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.hf.random_model import random_model
    from coattn.methods import find_method
    from coattn.provenance import provenance

    names = [find_method(name).name for name in options["methods"].split(",")]
    given = {name: options[name] for name in ("chunk", "target_ms", "gpu_kv") if options[name] is not None}
    setting = bench_beside.Setting(options["batch"], options["context"], options["tokens"], given)
    device = choose_device(options["device"])
    model = random_model(options["shapes"], device, choose_dtype(options["dtype"], device))
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            rows.append(bench_beside.run(model, name, setting))
        except CoattnError as error:
            rows.append({"method": name, "refused": str(error)})
    result = {"rows": rows, "shapes": options["shapes"], "simulated": ["random weights", "random tokens"]}
    result |= provenance()
    save(path, result)
    if as_json:
        print_json(result)
        return
    table = Table(title=f"{options['shapes']}, {setting.batch} x {setting.context:,} beside {setting.tokens:,} tokens")
    for name in ("method", "between, ms", "beside, ms", "p99", "x", "prompt alone, s", "beside, s", "x", "steps"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        if "refused" in row:
            table.add_row(row["method"], row["refused"])
            continue
        table.add_row(
            row["method"], f"{row['between_median_s'] * 1e3:.1f}",
            *("" if row[key] is None else f"{row[key] * 1e3:.1f}" for key in ("beside_median_s", "beside_p99_s")),
            "" if row["between_ratio"] is None else f"{row['between_ratio']:.2f}", f"{row['prompt_alone_s']:.2f}",
            f"{row['prompt_beside_s']:.2f}", f"{row['prompt_ratio']:.2f}", _steps(row),
        )  # fmt: skip
    out.print(table)


def _steps(row: dict[str, Any]) -> str:
    """How sequences decoded while the prompt was read."""
    return f"{row['steps']}, {row['mixed_steps']} mixed, {row['between_steps']} between layers"
