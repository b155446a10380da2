"""`coattn plan`: which method a model, a card and a length call for, before anything is loaded. Imports no PyTorch."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import Number, count_option, json_option, parse_settings, settings_option, weights_option
from coattn.cli.output import print_json, print_line, print_table
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_count

if TYPE_CHECKING:
    from coattn.tools.plan.estimate import Estimate, Machine
    from coattn.tools.plan.known import Card
    from coattn.tools.plan.shape import ModelShape

ASSUMED_CARD, ASSUMED_DRAM = "rtx4090", 64 << 30
MOST_TOKENS = 1 << 21
"""Where the model does not say how many positions it has."""
DEFAULT_TOKENS = 131072
CHUNK = 8192
"""As a GPU reads prompts."""
DRAM_GBPS = 60.0
"""Of two channels of DDR5, as desktops have them."""


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
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4"]),
    help="Plan a checkpoint of the model in so many bits (AWQ, GPTQ, GGUF).  [default: as config.json says]",
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
@count_option("--chunk", CHUNK, "Tokens of a prompt that are read at once: fewer take less memory.")
@click.option("--list", "listed", is_flag=True, help="List the models and cards that are known by name.")
@json_option
def plan(model: str | None, listed: bool, as_json: bool, **options: Any) -> None:
    """Show for each method whether MODEL fits, how much memory it takes and how fast it is. Loads nothing.

    MODEL is a folder, a config.json, a GGUF file, a known name such as Qwen3-32B, or a name on the Hugging Face hub.
    Bytes are exact to a few percent. Times are forecasts from the rates of the card and of DRAM.
    """
    from coattn.tools.plan import known

    if listed:
        found = {"models": known.models(), "cards": known.cards()}
        lines = ("\n  ".join([f"{what}:", *names]) for what, names in found.items())
        print_json(found) if as_json else print_line("\n".join(lines))
        return
    if model is None:
        raise ConfigError("There is no model to plan for.", "Give one: coattn plan Qwen/Qwen3-32B --gpu rtx4090.")
    from coattn.hf.families import FAMILIES, check_config, language_part
    from coattn.tools.plan.advice import in_bits
    from coattn.tools.plan.estimate import AHEAD, METHODS, Machine, count, estimate, longest
    from coattn.tools.plan.shape import read_shape

    method, batch, share = options["method"], options["batch"], options["weights_on_gpu"]
    card, dram = _machine(options)
    machine = Machine(card, dram, 1e9 * options["dram_speed"], 1.0 if share is None else share, options["chunk"])
    name, config = known.find_config(model)
    check_config(config)
    if language_part(config).get("model_type") not in FAMILIES:
        from torch import device

        from coattn.hf.kinds import layer_kinds

        layer_kinds(name, config, device("cpu"))  # as `doctor` looks at it; refuses what cannot be attended to
    if options["weights"] is not None:
        config = in_bits(name, config, options["weights"])
    shape = read_shape(name, config, options["dtype"])
    most = shape.positions or MOST_TOKENS
    asked = options["context"]
    tokens = min(most, DEFAULT_TOKENS) if asked is None else parse_count(asked, "--context")
    if method is not None:
        rows = [count(method, parse_settings(options["settings"]), shape, batch, tokens, machine)]
    elif options["settings"]:
        raise ConfigError("--set is given without --method.", "Say which method's parameter it is.")
    else:
        known_rows = [each for each in METHODS if not (shape.state_bytes and each in AHEAD)]
        rows = [estimate(each, shape, batch, tokens, machine) for each in known_rows]
    reach = [None if row.step_s is None else longest(row.method, shape, batch, machine, most) for row in rows]
    result = {
        "model": name,
        "context": tokens,
        "batch": batch,
        "gpu": {"name": machine.card.name, "bytes": machine.card.memory},
        "dram_bytes": machine.dram,
        "weight_bytes": shape.weight_bytes,
        "positions": shape.positions,
        "problem": _too_long(shape, tokens),
        "methods": [{**row.as_dict(), "longest": far} for row, far in zip(rows, reach, strict=True)],
    }
    folder = model if options["weights"] is None else "FOLDER"
    asked_for = None if method is None else rows[0]
    result |= _advise(folder, shape, machine, batch, min(tokens, most), asked_for, options["settings"])
    print_json(result) if as_json else _draw(result)


def _machine(options: dict[str, Any]) -> tuple[Card, int | None]:
    """The card and the bytes of DRAM."""
    from coattn.cache.available import memory
    from coattn.tools.plan.known import find_card, parse_size

    name = options["gpu"] or _own_gpu()
    card = find_card(name or ASSUMED_CARD)
    if name is None:
        card = replace(card, name=f"{card.name}, since there is no GPU here")
    if options["dram"] is not None:
        return card, parse_size(options["dram"], "--dram")
    return card, memory()[0] if options["gpu"] is None else ASSUMED_DRAM


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


def _too_long(shape: ModelShape, tokens: int) -> str | None:
    if shape.positions is None or tokens <= shape.positions:
        return None
    rope = shape.config.get("rope_scaling") or shape.config.get("rope_parameters") or {}
    own, factor = rope.get("original_max_position_embeddings") or shape.positions, rope.get("factor", 4.0)
    keys = f'"max_position_embeddings": {max(tokens, int(own * factor))}'
    if rope.get("rope_type", rope.get("type")) != "yarn":
        yarn = f'{{"rope_type": "yarn", "factor": {factor}, "original_max_position_embeddings": {own}}}'
        keys = f'"max_position_embeddings": {int(own * factor)} and "rope_scaling": {yarn}'
    return (
        f"Too long: {shape.name} has {shape.positions:,} positions, and {tokens:,} tokens are more. Ask for --context "
        f"{shape.positions} at most; or, if the model's page says that it takes YaRN, set {keys} in its config.json."
    )


def _advise(
    folder: str,
    shape: ModelShape,
    machine: Machine,
    batch: int,
    tokens: int,
    asked: Estimate | None,
    settings: tuple[str, ...],
) -> dict[str, Any]:
    """What to take and the command that runs it: the method that was asked for where it fits, else the best; where
    nothing fits, what would."""
    from coattn.tools.plan.advice import Advice, best, in_4_bits, what_would_fit

    said = "" if asked is None else f"{asked.method} {'fits' if asked.fits else 'does not fit'}. "
    found = Advice(asked, machine.weights_on_gpu) if asked and asked.fits else best(shape, batch, tokens, machine)
    if found is None:
        ways = what_would_fit(shape, batch, tokens, machine)
        would = f"Any one of these would: {'; '.join(ways)}." if ways else "Take a smaller model or larger memory."
        return {"recommended": None, "recommendation": f"{said}Nothing fits. {would}", "command": None}
    row, share = found
    words = [f"coattn serve --model {folder} --method {row.method}"]
    if row.method != "full":
        words.append(f"--gpu-kv {-(-row.kv >> 20) + 1}MiB")
    words.append(f"--max-length {tokens} --max-batch {batch}")
    words += [f"--chunk {machine.chunk}"] * (machine.chunk != CHUNK)
    words += [f"--weights-on-gpu {share:g}"] * (share < 1) + [f"--set {each}" for each in settings]
    if row is not asked:
        why = "the KV cache does not fit in GPU memory" if share == 1 else "GPU memory is short"
        why = (
            "everything fits in GPU memory" if row.method == "full" and share == 1 else f"{why}, and it is the fastest"
        )
        if share < 1:
            why += f" with {1 - share:.0%} of the layers' weights coming from DRAM in every step"
        speed = f"{row.first_token_s:,.1f} s to the first token, {batch / (row.step_s or 1):,.1f} tokens/s"
        said += f"Take {row.method}: {why} ({speed})."
    if folder == "FOLDER":
        said += f" FOLDER is a checkpoint of {shape.name} in that many bits."
    elif share < 1 and in_4_bits(shape):
        said += " --weights int4 plans a checkpoint in 4 bits."
    return {"recommended": row.method, "recommendation": said.strip(), "command": " ".join(words)}


def _draw(result: dict[str, Any]) -> None:
    """The table for people, and what to do."""
    if result["problem"]:
        print_line(result["problem"])
    gpu, dram, batch = result["gpu"], result["dram_bytes"], result["batch"]
    title = (
        f"{result['model']}, {batch} x {result['context']:,} tokens, on {gpu['name']} ({format_bytes(gpu['bytes'])}), "
        f"DRAM {'unlimited' if dram is None else format_bytes(dram)}; weights {format_bytes(result['weight_bytes'])}"
    )
    columns = ("method", "quality", ">fits", ">longest context", ">GPU memory", ">of it KV", ">DRAM", ">first token")
    rows = []
    for row in result["methods"]:
        far, first, step = row["longest"], row["first_token_s"], row["step_s"]
        reach = "-" if far is None else f"{far:,}" if far else "none"
        fits = "yes" if row["fits"] else "no (DRAM)" if row["fits_gpu"] else "no (GPU)"
        sizes = (format_bytes(row[place]) for place in ("gpu", "kv", "dram"))
        times = "-" if first is None else f"{first:,.1f} s", "-" if step is None else f"{batch / step:,.1f}"
        rows.append((row["method"], row["quality"], fits, reach, *sizes, *times))
    print_table((*columns, ">tokens/s"), rows, title, title_justify="left")
    shorter = f"At {min(result['context'], result['positions'] or MOST_TOKENS):,} tokens: " * bool(result["problem"])
    print_line(shorter + result["recommendation"])
    if result["command"]:
        print_line(f"  {result['command']}")
