"""`coattn plan`: which method a model, a card and a length call for, before anything is loaded. Imports no PyTorch."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from coattn.cli.options import Number, count_option, json_option, parse_settings, settings_option, weights_option
from coattn.cli.output import out, print_json
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_count

if TYPE_CHECKING:
    from coattn.tools.plan.estimate import Estimate, Machine
    from coattn.tools.plan.shape import ModelShape

ASSUMED_CARD, ASSUMED_DRAM = "rtx4090", 64 << 30
MOST_TOKENS = 1 << 21
"""Where the model does not say how many positions it has."""
DEFAULT_TOKENS = 131072
DRAM_GBPS = 60.0
"""Of two channels of DDR5, as desktops have them."""
WHY = {
    "full": "everything fits in GPU memory",
    "auto": "the KV cache does not fit in GPU memory",
    "cpu": "GPU memory is short",
    "offload": "GPU memory is short",
}
"""Methods in the order in which they are recommended."""


@click.command()
@click.argument("model", required=False)
@click.option("--gpu", metavar="CARD", help="A card (rtx4090, 2xrtx3090, h100) or its memory (24, 24GB).  "
              f"[default: this machine's, else {ASSUMED_CARD}]")  # fmt: skip
@click.option("--dram", metavar="SIZE", help="Memory of the machine (64, 64GB).  "
              "[default: this machine's; with --gpu 64GiB]")  # fmt: skip
@click.option(
    "--context",
    metavar="TOKENS",
    help="Length of each sequence, prompt and answer, such as 200k.  [default: the model's, at most 131072]",
)
@count_option("--batch", 1, "Number of sequences.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", help="Numbers of the model."
)
@weights_option
@click.option("--method", help="One row of `coattn methods` instead of all, its bytes counted by the cache itself.")
@settings_option
@click.option(
    "--dram-speed",
    default=DRAM_GBPS,
    type=Number(0, min_open=True),
    help="Speed at which all cores read DRAM, in GB/s.",
)
@click.option("--list", "listed", is_flag=True, help="List the models and cards that are known by name.")
@json_option
def plan(model: str | None, listed: bool, as_json: bool, **options: Any) -> None:
    """Show for each method whether MODEL fits, how much memory it takes and how fast it is. Loads nothing.

    MODEL is a folder, a config.json, a known name such as Qwen3-32B, or a name on the Hugging Face hub. Bytes are
    exact to a few percent. Times are forecasts from the rates of the card and of DRAM.
    """
    from coattn.tools.plan import known

    if listed:
        _list(known, as_json)
        return
    if model is None:
        raise ConfigError("There is no model to plan for.", "Give one: coattn plan Qwen/Qwen3-32B --gpu rtx4090.")
    from coattn.hf.families import refusal
    from coattn.tools.plan.estimate import METHODS, Machine, estimate, longest
    from coattn.tools.plan.shape import read_shape

    machine = Machine(*_machine(known, options), 1e9 * options["dram_speed"], _share(options["weights_on_gpu"]))
    name, config = known.find_config(model)
    refused = refusal(config)
    if refused is not None:
        raise refused
    shape = read_shape(name, config, options["dtype"])
    most = shape.positions or MOST_TOKENS
    asked = options["context"]
    tokens = min(most, DEFAULT_TOKENS) if asked is None else parse_count(asked, "--context")
    problem = _too_long(shape, tokens)
    if options["method"] is not None:
        from coattn.tools.plan.counted import count

        settings = parse_settings(options["settings"])
        rows = [count(options["method"], settings, shape, options["batch"], tokens, machine)]
    elif options["settings"]:
        raise ConfigError("--set is given without --method.", "Say which method's parameter it is.")
    else:
        rows = [estimate(method, shape, options["batch"], tokens, machine) for method in METHODS]
    reach = [
        None if row.step_s is None else longest(row.method, shape, options["batch"], machine, most) for row in rows
    ]
    advice = _advise(model, shape, machine, options["batch"], tokens)
    if as_json:
        print_json(
            {
                "model": name,
                "context": tokens,
                "batch": options["batch"],
                "gpu": {"name": machine.card.name, "bytes": machine.card.memory},
                "dram_bytes": machine.dram,
                "weight_bytes": shape.weight_bytes,
                "problem": problem,
                "methods": [
                    {**asdict(row), "gpu": row.gpu, "fits": row.fits, "quality": row.quality, "longest": far}
                    for row, far in zip(rows, reach, strict=True)
                ],
                **advice,
            }
        )
        return
    if problem:
        out.print(problem, highlight=False, soft_wrap=True)
    _draw(name, shape, machine, options["batch"], tokens, rows, reach)
    if not problem and options["method"] is None:
        out.print(advice["recommendation"], highlight=False, soft_wrap=True)
        if advice["command"]:
            out.print(f"  {advice['command']}", highlight=False, soft_wrap=True)


def _machine(known: Any, options: dict[str, Any]) -> tuple[Any, int | None]:
    """The card and the bytes of DRAM."""
    from coattn.cache.available import memory

    given = options["gpu"]
    name = given or _own_gpu()
    card = known.find_card(name or ASSUMED_CARD)
    if name is None:
        card = replace(card, name=f"{card.name}, since there is no GPU here")
    if options["dram"] is not None:
        return card, known.parse_size(options["dram"], "--dram")
    return card, ASSUMED_DRAM if given is not None else memory()[0]


def _own_gpu() -> str | None:
    """The first GPU of this machine, as its driver names it: by name where it is known, else by its memory."""
    from coattn.tools.plan.known import find_card

    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
        name, memory = said[0].split(",")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
    try:
        find_card(name)
    except ConfigError:
        return f"{int(memory)}MiB"
    return name


def _share(given: float | None) -> float:
    return 1.0 if given is None else given


def _too_long(shape: ModelShape, tokens: int) -> str | None:
    if shape.positions is None or tokens <= shape.positions:
        return None
    return (
        f"Too long: {shape.name} has {shape.positions:,} positions, and {tokens:,} tokens are more. Ask for --context "
        f"{shape.positions} at most, or set rope_scaling (YaRN) in its config.json if its card allows."
    )


def _advise(model: str, shape: ModelShape, machine: Machine, batch: int, tokens: int) -> dict[str, Any]:
    """The first method that fits, in the order of preference, and the command that runs it; else the way forward.

    Where weights alone are too much for the GPU, it is tried with a part of them in DRAM.
    """
    from coattn.tools.plan.estimate import estimate

    shares = [machine.weights_on_gpu, *(share / 20 for share in range(19, 1, -1))] if machine.card.count == 1 else [1.0]
    for share in shares:
        tried = replace(machine, weights_on_gpu=share)
        rows = [estimate(method, shape, batch, tokens, tried) for method in WHY]
        taken = next((row for row in rows if row.fits), None)
        if taken is None:
            continue
        words = [f"coattn serve --model {model} --method {taken.method}"]
        if taken.method != "full":
            words.append(f"--gpu-kv {-(-taken.kv >> 20) + 1}MiB")
        words.append(f"--max-length {tokens} --max-batch {batch}")
        why = WHY[taken.method]
        if share < 1:
            words.append(f"--weights-on-gpu {share:g}")
            why += f", and {1 - share:.0%} of the layers' weights come from DRAM in every step"
        speed = f"{taken.first_token_s:,.1f} s to the first token, {batch / (taken.step_s or 1):,.1f} tokens/s"
        return {
            "recommended": taken.method,
            "recommendation": f"Take {taken.method}: {why} ({speed}).",
            "command": " ".join(words),
        }
    least = estimate("cpu", shape, batch, tokens, replace(machine, weights_on_gpu=0.1))
    gpu, dram = format_bytes(least.gpu), format_bytes(least.dram)
    return {
        "recommended": None,
        "recommendation": f"Nothing fits: even cpu with a tenth of the weights on the GPU needs {gpu} of GPU memory "
        f"and {dram} of DRAM. Take a shorter context, a smaller or quantised model, or more memory.",
        "command": None,
    }


def _draw(
    name: str,
    shape: ModelShape,
    machine: Machine,
    batch: int,
    tokens: int,
    rows: list[Estimate],
    reach: list[int | None],
) -> None:
    dram = "unlimited" if machine.dram is None else format_bytes(machine.dram)
    title = (
        f"{name}, {batch} x {tokens:,} tokens, on {machine.card.name} ({format_bytes(machine.card.memory)}), "
        f"DRAM {dram}; weights {format_bytes(shape.weight_bytes)}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column("quality")
    for column in ("fits", "longest context", "GPU memory", "of it KV", "DRAM", "first token", "tokens/s"):
        table.add_column(column, justify="right")
    for row, far in zip(rows, reach, strict=True):
        fits = "yes" if row.fits else "no (GPU)" if not row.fits_gpu else "no (DRAM)"
        table.add_row(
            row.method,
            row.quality,
            fits,
            "-" if far is None else f"{far:,}" if far else "none",
            format_bytes(row.gpu),
            format_bytes(row.kv),
            format_bytes(row.dram),
            "-" if row.first_token_s is None else f"{row.first_token_s:,.1f} s",
            "-" if row.step_s is None else f"{batch / row.step_s:,.1f}",
        )
    out.print(table)


def _list(known: Any, as_json: bool) -> None:
    found = {"models": known.models(), "cards": known.cards()}
    if as_json:
        print_json(found)
        return
    for what, names in found.items():
        out.print(f"{what}:", highlight=False)
        for name in names:
            out.print(f"  {name}", highlight=False)
