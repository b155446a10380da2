"""`coattn doctor`: what this machine has, what will be used and why; of a model, whether it runs and with what."""

from typing import Any

import click

from coattn.cli.options import json_option
from coattn.cli.output import print_json, print_line, print_table
from coattn.errors import CoattnError, ConfigError


@click.command()
@click.option("--model", help="Also say whether this model runs: a folder, a config.json, a GGUF file or a hub name.")
@json_option
def doctor(model: str | None, as_json: bool) -> None:
    """Show this machine's GPU, cores, instruction sets and memory, and what coattn uses of them and why.

    With --model, also what its config.json says: whether coattn runs it, its heads, windows and positions, the bytes
    of KV cache that a token takes, and how each kind of its layers runs. Nothing else of the model is read.
    """
    from coattn.engine.plan.machine import examine
    from coattn.hf.families import check_config
    from coattn.hf.kinds import layer_kinds
    from coattn.hf.load import choose_device
    from coattn.tools.plan.known import find_config
    from coattn.tools.plan.shape import read_shape

    name, config = ("", {}) if model is None else find_config(model)
    found, shape, rows = examine(), None, list[dict[str, str]]()
    try:
        device = choose_device("auto")
    except ConfigError:  # a GPU that is too old: a hint says so
        device = choose_device("cpu")
    if name:
        facts: dict[str, Any] = {"name": name, "family": config["model_type"], "runs": "yes"}
        found["model"] = facts
        try:
            check_config(config)
            shape = read_shape(name, config, next(use["choice"] for use in found["uses"] if use["part"] == "numbers"))
            rows = layer_kinds(name, config, device)
            facts |= {key: getattr(shape, key) for key in ("layers", "q_heads", "kv_heads", "head_dim", "positions")}
            facts["kv_bytes_per_token"] = shape.token_bytes * len(shape.windows)
        except CoattnError as error:
            facts |= {"runs": "no", "reason": f"{error.sentence} {error.hint}"}
    found["uses"] += [*attention(shape, device), *rows]
    if as_json:
        print_json(found)
        return
    reason = found.get("model", {}).pop("reason", None)
    if reason is not None:
        print_line(f"{name} does not run: {reason}")
    for title in ("model", "machine"):
        if title in found:
            lines = ((f"[bold]{key.replace('_', ' ')}", str(fact or "none")) for key, fact in found[title].items())
            print_table(("", ""), lines, f"The {title}", show_header=False)
    uses = ((row["part"], row["choice"], row["reason"]) for row in found["uses"])
    print_table(("part", "what will be used", "why"), uses, "What coattn will use")
    for hint in found["hints"]:
        print_line(f"hint: {hint}")


def attention(model: Any, device: Any) -> list[dict[str, Any]]:
    """Who attends, tried on the heads of a `ModelShape`; None: to prompts, of an 8B model on a GPU, else a smaller."""
    from coattn.hf.load import choose_dtype
    from coattn.kernels.prompt.choice import best, flaw, probe, tile_kernel
    from coattn.kernels.prompt.kernels import KERNELS
    from coattn.kernels.prompt.mask import Mask, Shape

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
    return [{"part": "attention of prompts", "choice": chosen, "reason": reason}]
