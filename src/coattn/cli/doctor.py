"""`coattn doctor`: what this machine has, what will be used and why."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from coattn.cli.options import json_option
from coattn.cli.output import out, print_json


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show this machine's GPU, cores, instruction sets and memory, and what coattn uses of them and why."""
    from coattn.engine.plan.machine import examine

    found = examine()
    found["uses"].append(prompt_attention())
    if as_json:
        print_json(found)
        return
    table = Table(title="This machine", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in found["machine"].items():
        table.add_row(name.replace("_", " "), "none" if value is None else str(value))
    out.print(table)
    use = Table("part", "what will be used", "why", title="What coattn will use")
    for row in found["uses"]:
        use.add_row(row["part"], row["choice"], row["reason"])
    out.print(use)
    for hint in found["hints"]:
        out.print(f"hint: {hint}", highlight=False)


def prompt_attention() -> dict[str, Any]:
    """Who attends to prompts, tried on the shape of an 8B model on a GPU, else on a smaller one."""
    from coattn.errors import ConfigError
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.kernels.prompt.choice import best, flaw, probe, tile_kernel
    from coattn.kernels.prompt.kernels import KERNELS
    from coattn.kernels.prompt.mask import Mask, Shape

    try:
        device = choose_device("auto")
    except ConfigError:  # a GPU that is too old: a hint says so
        device = choose_device("cpu")
    dtype = choose_dtype("auto", device)
    if device.type == "cuda":
        shape = Shape(device, dtype, 32, 8, 128, 8192, 16384, Mask(False))
    else:
        shape = Shape(device, dtype, 8, 2, 64, 512, 512)
    chosen = (tile_kernel(shape) or best(shape)).name
    flaws = {kernel.name: flaw(kernel, probe(shape)) for kernel in KERNELS if device.type == "cuda"}
    passed = "".join(f"; {name}: {why}" for name, why in flaws.items() if why is not None)
    what = f"{shape.tokens:,} queries over {shape.keys:,} keys, {str(dtype).removeprefix('torch.')}"
    reason = f"the fastest that runs here and gives the right numbers, of {what}{passed}"
    return {"part": "attention of prompts", "choice": chosen, "reason": reason}
