"""`coattn doctor`: what this machine has, what will be used and why."""

from typing import Any

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_line, print_table


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
    facts = ((f"[bold]{name.replace('_', ' ')}", str(fact or "none")) for name, fact in found["machine"].items())
    print_table(("", ""), facts, "This machine", show_header=False)
    uses = ((row["part"], row["choice"], row["reason"]) for row in found["uses"])
    print_table(("part", "what will be used", "why"), uses, "What coattn will use")
    for hint in found["hints"]:
        print_line(f"hint: {hint}")


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
