"""`coattn doctor`: what this machine has, what will be used and why; of a model, whether it runs and with what."""

from typing import Any

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_line, print_table


@click.command()
@click.option("--model", help="Also say whether this model runs: a folder, a config.json or a hub name.")
@json_option
def doctor(model: str | None, as_json: bool) -> None:
    """Show this machine's GPU, cores, instruction sets and memory, and what coattn uses of them and why.

    With --model, also what its config.json says: whether coattn runs it, its heads, windows and positions, the bytes
    of KV cache that a token takes, and the kernels that attend. Nothing else of the model is read.
    """
    from coattn.hf.families import refusal
    from coattn.tools.plan.known import find_config
    from coattn.tools.plan.shape import read_shape

    name, config = ("", {}) if model is None else find_config(model)
    refused = refusal(config) if name else None

    from coattn.engine.plan.machine import examine

    found, shape = examine(), None
    if name:
        found["model"] = {"name": name, "family": config["model_type"], "runs": "yes" if refused is None else "no"}
        if refused is None:
            shape = read_shape(name, config, next(use["choice"] for use in found["uses"] if use["part"] == "numbers"))
            sliding = [window for window in shape.windows if window]
            names = ("layers", "q_heads", "kv_heads", "head_dim", "positions")
            found["model"] |= {name: getattr(shape, name) for name in names}
            found["model"]["windows"] = f"{len(sliding)} layers see {sliding[0]} tokens" if sliding else None
            found["model"]["kv_bytes_per_token"] = shape.token_bytes * shape.layers
        else:
            found["hints"].insert(0, f"{name} does not run: {refused.sentence} {refused.hint}")
    found["uses"] += attention(shape)
    if as_json:
        print_json(found)
        return
    for title, facts in (("The model", found.get("model")), ("This machine", found["machine"])):
        if facts:
            rows = ((f"[bold]{key.replace('_', ' ')}", str(fact or "none")) for key, fact in facts.items())
            print_table(("", ""), rows, title, show_header=False)
    uses = ((row["part"], row["choice"], row["reason"]) for row in found["uses"])
    print_table(("part", "what will be used", "why"), uses, "What coattn will use")
    for hint in found["hints"]:
        print_line(f"hint: {hint}")


def attention(model: Any) -> list[dict[str, Any]]:
    """Who attends, tried on the heads of a `ModelShape`; None: to prompts, of an 8B model on a GPU, else a smaller."""
    from importlib import import_module

    import torch

    from coattn.errors import ConfigError
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.kernels.prompt.choice import best, flaw, probe, tile_kernel
    from coattn.kernels.prompt.kernels import KERNELS
    from coattn.kernels.prompt.mask import Mask, Shape

    try:
        device = choose_device("auto")
    except ConfigError:  # a GPU that is too old: a hint says so
        device = choose_device("cpu")
    dtype, on_gpu = choose_dtype("auto", device), device.type == "cuda"
    size, many = ((32, 8, 128), (8192, 16384)) if on_gpu else ((8, 2, 64), (512, 512))
    size = size if model is None else (model.q_heads, model.kv_heads, model.head_dim)
    softcap = model and model.config.get("attn_logit_softcapping")
    shape = Shape(device, dtype, *size, *many, Mask(False, softcap=softcap))
    chosen = (tile_kernel(shape) or best(shape)).name
    flaws = {kernel.name: flaw(kernel, probe(shape)) for kernel in KERNELS}
    passed = "".join(f"; {name}: {why}" for name, why in flaws.items() if why and not why.startswith("it runs on"))
    what = f"{shape.tokens:,} queries over {shape.keys:,} keys, {str(dtype).removeprefix('torch.')}"
    reason = f"the fastest that runs here and gives the right numbers, of {what}{passed}"
    uses = [{"part": "attention of prompts", "choice": chosen, "reason": reason}]
    if model is not None:
        q = torch.empty(1, 1, size[0], size[2], dtype=dtype, device=device)
        kernel = import_module(f"coattn.kernels.{'triton' if on_gpu else 'native'}.attend")
        why = kernel.refuses(q, q.new_empty(1, size[1], 2, 64, size[2]))
        choice = "reference" if why else "Triton" if on_gpu else "C++ kernels"
        reason = why or f"they take {size[0]} query heads on {size[1]}, each of {size[2]} numbers"
        uses.append({"part": "attention of a decode step", "choice": choice, "reason": reason})
    return uses
