"""`coattn plan`: what a method would hold where, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from coattn.cli.options import (
    Number,
    count_option,
    devices_options,
    json_option,
    method_option,
    parse_devices,
    parse_settings,
    settings_option,
    weights_option,
)
from coattn.cli.output import out, print_json
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_bytes

SHAPES = "llama-3-8b"


@click.command()
@method_option()
@settings_option
@click.option("--shapes", help="Plan for these model shapes, by name.  [default: llama-3-8b]")
@click.option(
    "--model",
    help="Plan for this model instead: smollm2, a folder, a GGUF file or a hub name. Only its config is read.",
)
@click.option("--dtype", default="bfloat16", help="Numbers of the model: auto, float32, bfloat16 or float16.")
@count_option("--context", 131072, "Length of each sequence in tokens.")
@count_option("--batch", 1, "Number of sequences.")
@weights_option
@devices_options
@click.option("--gpu-memory", metavar="SIZE", help="Check whether weights and KV cache fit in this memory of each GPU.")
@click.option("--host-memory", metavar="SIZE", help="Check whether the KV cache in DRAM fits in this memory.")
@click.option(
    "--hbm", default=4200.0, type=Number(0, min_open=True), help="Speed at which the GPU reads its memory, in GB/s."
)
@click.option(
    "--pcie",
    default=40.0,
    type=Number(0, min_open=True),
    help="Speed at which the GPU gathers single tokens over PCIe, in GB/s.",
)
@json_option
def plan(as_json: bool, **options: Any) -> None:
    """Show how many bytes a method needs in GPU memory and DRAM, and whether they fit. Loads no model.

    For `full` and `auto` it also shows the shortest possible decode step: bytes divided by --hbm and --pcie, whose
    defaults were measured on an NVIDIA H200. With --gpu-memory it shows which method the engine would choose.
    """
    import torch

    from coattn.engine.plan.kv import plan as found_by
    from coattn.engine.plan.speed import Rates
    from coattn.hf.load import choose_dtype
    from coattn.method.row import compose
    from coattn.method.table import find_method

    composed = compose(find_method(options["method"]), **parse_settings(options["settings"]))
    limits = [parse_bytes(options[name], f"--{name.replace('_', '-')}") for name in ("gpu_memory", "host_memory")]
    nowhere = torch.device("meta")
    named, model = _model(options["shapes"], options["model"], choose_dtype(options["dtype"], nowhere))
    share = 1.0 if options["weights_on_gpu"] is None else options["weights_on_gpu"]
    gpu, host = limits
    asked = parse_devices(options["devices"], options["device_shares"])
    if asked is not None and options["weights_on_gpu"] is not None:
        raise ConfigError("--devices and --weights-on-gpu exclude each other.", "Give one of them.")
    division = None if asked is None else _divide(model, composed, options["batch"], options["context"], *asked)
    found = found_by(model, composed, options["batch"], options["context"], gpu, host, share, division)
    found |= predict(model, composed, found, gpu, Rates(1e9 * options["hbm"], 1e9 * options["pcie"]))
    if as_json:
        print_json({"model" if options["model"] else "shapes": named, **found})
        return
    table = Table(title=f"{found['method']}, {named}, {found['batch']} x {found['context']:,} tokens")
    for column in ("what", "bytes", "share of full KV", "fits"):
        table.add_column(column, justify="left" if column == "what" else "right")
    share = found["host_kv_bytes"] / found["full_kv_bytes"]
    table.add_row("weights on the GPU", format_bytes(found["gpu_weight_bytes"]), "", "")
    if found["host_weight_bytes"]:
        table.add_row("weights in DRAM, brought in by every step", format_bytes(found["host_weight_bytes"]), "", "")
    table.add_row("KV in the GPU tier", format_bytes(found["gpu_kv_bytes"]), f"{found['gpu_share']:.2%}", "")
    table.add_row("GPU memory", format_bytes(found["gpu_bytes"]), "", _word(found["fits_gpu"]))
    table.add_row("KV in DRAM", format_bytes(found["host_kv_bytes"]), f"{share:.2%}", _word(found["fits_host"]))
    if found["host_copies_bytes"]:
        more, of = found["host_copies_bytes"], found["full_kv_bytes"]
        table.add_row(
            "entries chosen there, at most", format_bytes(more), f"{more / of:.2%}", _word(found["fits_copies"])
        )
    out.print(table)
    if "devices" in found:
        each = Table("device", "layers", "weights", "KV in the GPU tier", "GPU memory", "fits", title="On each device")
        for row in found["devices"]:
            sizes = [format_bytes(row[name]) for name in ("weight_bytes", "gpu_kv_bytes", "gpu_bytes")]
            first, last = row["layers"]
            each.add_row(row["device"], f"{first} to {last}", *sizes, _word(row["fits"]))
        out.print(each)
    if found["step"] is not None and found["fits_gpu"] is not False:
        step = found["step"]
        parts = {"weights": "weight_bytes", "KV": "kv_bytes", "sketches": "scan_bytes", "over PCIe": "pulled_bytes"}
        read = ", ".join(f"{name} {format_bytes(step[key])}" for name, key in parts.items() if step[key])
        out.print(
            f"a decode step at best: {step['ms']:.2f} ms, {step['tokens_per_s']:,.0f} tokens/s ({read})",
            highlight=False,
        )
    if found["taken"] is not None:
        out.print(f"the engine would choose: {found['taken']} ({found['taken_why']})", highlight=False)


def _model(shapes: str | None, model: str | None, dtype: Any) -> tuple[str, Any]:
    """What is planned for, by name, without weights. Raises UnsupportedError for a family that does not run here."""
    import torch

    from coattn.hf.architectures import check_family
    from coattn.hf.load import load_shapes
    from coattn.hf.random_model import random_model

    if model is None:
        return shapes or SHAPES, random_model(shapes or SHAPES, torch.device("meta"), dtype)
    if shapes is not None:
        raise ConfigError("--model and --shapes exclude each other.", "Give one of them.")
    found = load_shapes(model, dtype)
    check_family(found)
    return Path(model).name, found


def predict(model: Any, composed: Any, found: dict[str, Any], gpu: int | None, rates: Any) -> dict[str, Any]:
    """step: what a decode step takes, where that is known; taken: the method that an engine would choose, and why."""
    from coattn.engine.devices import SHARE
    from coattn.engine.method_choice import candidates, choose
    from coattn.engine.plan.speed import step
    from coattn.hf.architectures import describe_layers

    layers, weights = describe_layers(model), found["gpu_weight_bytes"]
    made = step(layers, composed, found["batch"], found["context"], weights, rates)
    if gpu is None:
        return {"step": made, "taken": None, "taken_why": None}
    room = max(0, int(SHARE * (gpu - weights)))
    row, why = choose(candidates({}), layers, room, found["batch"], found["context"])
    of = "" if row.name == "full" else f", {SHARE:.0%} of what the weights leave"
    return {"step": made, "taken": row.name, "taken_why": why + of}


def _divide(model: Any, composed: Any, batch: int, context: int, devices: list[str], shares: list[float] | None) -> Any:
    """Devices by name, whether or not this machine has them."""
    import torch

    from coattn.engine.plan.kv import layer_kv
    from coattn.hf.architectures import describe_layers
    from coattn.hf.division import choose_shares, divide, sizes

    try:
        found = tuple(torch.device(name) for name in devices)
    except RuntimeError:
        raise ConfigError(f"--devices {','.join(devices)} has no device.", "Write it like cuda:0,cuda:1.") from None
    kv = layer_kv(describe_layers(model), composed, batch, context)
    return divide(sizes(model), kv, found, choose_shares(shares, len(found)))


def _word(fits: bool | None) -> str:
    return "" if fits is None else "yes" if fits else "no"
