"""`coattn-lab bench decode`: the decode step under each method, beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from coattn.cli.options import (
    Count,
    Number,
    devices_options,
    is_given,
    json_option,
    numbers,
    parse_devices,
    parse_settings,
)
from coattn.cli.output import err, keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_bytes
from coattn_lab.cli.groups import bench, empty_table


def seconds_option(default: float) -> Callable[[Any], Any]:
    """--seconds of a benchmark of decode steps."""
    text = "Longest time for a row; it always runs three steps."
    return click.option("--seconds", default=default, type=Number(0), help=text)


@bench.command()
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--methods", default="full,offload,cpu", show_default=True, help="Rows of `coattn methods`, with commas.")
@click.option("--batch", default="1", show_default=True, callback=numbers, help="Batch sizes.")
@click.option("--context", default="8192", show_default=True, callback=numbers, help="Context lengths.")
@click.option("--gpu-kv", metavar="SIZE", help="Most KV memory in the GPU tier; default: no limit.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A method's parameter, where it has it.")
@click.option(
    "--fetched",
    type=Number(0),
    help="Tokens that a KV head fetches in a step, under auto; random weights fetch any number.",
)
@click.option("--kept", help="Shares of DRAM's entries that heads attend to, with commas, under methods that choose.")
@click.option("--change", type=click.FloatRange(0, 0.9), help="Drive scout's picks: share of blocks new in a step.")
@click.option(
    "--wrong", default=0.05, show_default=True, type=click.FloatRange(0, 1), help="With --change: scores mispredicted."
)
@click.option("--steps", default=64, show_default=True, type=Count(4), help="Most steps per row.")
@seconds_option(10.0)
@click.option("--turns", default=1, show_default=True, type=Count(1), help="Measure every row so often, in turns.")
@click.option("--peers", is_flag=True, help="Add Transformers with its full and its offloaded cache.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@devices_options
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def decode(target: str | None, as_json: bool, **options: Any) -> None:
    """The decode step: ms and tokens/s of each method, beside the least time its bytes need on this machine."""
    path = writable(target)
    names = options["methods"].split(",")

    from coattn.hf.division import choose_devices, choose_shares
    from coattn.hf.load import choose_device
    from coattn_lab.bench import decode as bench_decode

    asked = parse_devices(options.pop("devices"), options.pop("device_shares"))
    options["several"] = None if asked is None else (choose_devices(asked[0]), choose_shares(asked[1], len(asked[0])))
    if asked is not None and is_given("device"):
        raise ConfigError("Both --devices and --device are given.", "Leave one out.")
    if asked is not None and options["peers"]:
        raise ConfigError("--peers run on one device, but --devices is given.", "Leave one out.")
    options["device"] = choose_device(options["device"]) if asked is None else options["several"][0][0]
    result = measure(plan(names, options, bench_decode) * options["turns"], options, "decode", path)
    save(path, result)
    if as_json:
        print_json(result)
    else:
        show(result)


def measure(cases: list[Any], options: dict[str, Any], title: str, path: Path | None) -> dict[str, Any]:
    """The rows of these cases, with the limits measured before them; options as the command has them, and a device.

    path: where the rows are kept as they come.
    """
    from coattn.hf.load import choose_dtype
    from coattn.provenance import provenance
    from coattn_lab.bench import decode as bench_decode
    from coattn_lab.bench import limits
    from coattn_lab.bench.random_model import random_model

    device = options["device"]
    found = limits.measure(device) if device.type == "cuda" else limits.measure(device, 256 << 20)
    model = random_model(options["shapes"], device, choose_dtype("auto", device))
    budget = parse_bytes(options["gpu_kv"], "--gpu-kv")
    pipeline = None if options.get("several") is None else _divided(model, *options["several"])
    run = bench_decode.Bench(model, options["shapes"], found, budget, options["steps"], pipeline=pipeline)
    result = {"rows": [], "limits": found, "weight_bytes": run.weights.of(1), **provenance()}
    collect(run, cases, options["seconds"], title, path, result)
    return result


def _divided(model: Any, devices: Any, shares: Any) -> Any:
    """By weights alone: batches and contexts differ from row to row."""
    from coattn.hf.division import divide, sizes
    from coattn.hf.pipeline import PipelineStages

    found = sizes(model)
    return PipelineStages(model, divide(found, [0] * len(found.layers), devices, shares))


def collect(run: Any, cases: list[Any], seconds: float, title: str, path: Path | None, result: dict[str, Any]) -> None:
    """Adds the cases' rows to the result, says each, and keeps what there is."""
    with progress(title, len(cases)) as bar:
        for row in run.run(cases, seconds):
            result["rows"].append(asdict(row))
            keep(path, **result)
            err.print(f"{row.method} batch {row.batch} at {row.context:,}: {row.ms_per_step:.2f} ms", highlight=False)
            bar.advance(bar.task_ids[0])


def plan(names: list[str], options: dict[str, Any], bench_decode: Any) -> list[Any]:
    """Every case that was asked for; methods and parameters that do not exist are refused."""
    from coattn.method.row import compose
    from coattn.method.table import find_method
    from coattn_lab.bench.scout import driven

    given, used = parse_settings(options["settings"]), set()
    kept = shares(options["kept"])
    cases = []
    for batch in options["batch"]:
        for context in options["context"]:
            for name in names:
                known = compose(find_method(name)).params
                params = {k: v for k, v in given.items() if k in known}
                used |= set(params)
                chooses = bool({"beta", "share", "cap"} & set(known))
                case = bench_decode.Case(name, batch, context, params, kept if chooses else ())
                if options["fetched"] is not None and find_method(name).index == "sketch":
                    case = replace(case, fetched=options["fetched"])
                if options.get("change") is not None and "recall_interval" in known:
                    case = driven(case, options["change"], options["wrong"])
                cases.append(case)
            if options["peers"]:
                # the offloaded cache moves layers between a GPU and DRAM: without a GPU there is none
                peers = bench_decode.PEERS if options["device"].type == "cuda" else bench_decode.PEERS[:1]
                cases += [bench_decode.Case(name, batch, context) for name in peers]
    unknown = sorted(set(given) - used)
    if unknown:
        raise ConfigError(f"None of the methods has a parameter {unknown[0]!r}.", "See `coattn methods NAME`.")
    return cases


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    title = f"{result['rows'][0]['shapes']}, weights {format_bytes(result['weight_bytes'])}"
    heads = "batch | context | ms/step | p99 | tokens/s | floor ms | x floor | GPU waits | CPU share"
    table = empty_table(title, "method", f"{heads} | DRAM GB/s | GPU KV | DRAM KV")
    for row in result["rows"]:
        floor, idle, rate = row["floor_ms"], row["gpu_idle"], row["host_gbps"]
        extra = " ".join(f"{k}={v}" for k, v in row["params"].items())
        table.add_row(
            f"{row['method']} {extra}".strip(), str(row["batch"]), f"{row['context']:,}", f"{row['ms_per_step']:.2f}",
            f"{row['p99_ms']:.2f}", f"{row['tokens_per_s']:.1f}", f"{floor:.2f}", f"{row['ms_per_step'] / floor:.2f}",
            "" if idle is None else f"{idle:.0%}", f"{row['cpu_ratio']:.0%}", "" if rate is None else f"{rate:.1f}",
            format_bytes(row["gpu_kv_bytes"]), format_bytes(row["host_kv_bytes"]),
        )  # fmt: skip
    out.print(table)
    limits = ", ".join(f"{k.removesuffix('_gbps')} {v:.0f}" for k, v in result["limits"].items() if "gbps" in k and v)
    out.print(f"limits in GB/s: {limits}", highlight=False)
    out.print(f"simulated: {'; '.join(simulations(result['rows']))}", highlight=False, soft_wrap=True)


def simulations(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows have in place of a trained model on a text; where only some have it, which methods."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name in row["simulated"]:
            found.setdefault(name, []).append(row["method"])
    every = len(rows)
    return [
        name if len(having) == every else f"{name} ({', '.join(dict.fromkeys(having))})"
        for name, having in found.items()
    ]


def shares(text: str | None) -> tuple[float, ...]:
    """Numbers between 0 and 1 with commas."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1.0,)
    if not all(0 <= share <= 1 for share in found):
        raise ConfigError(f"--kept {text} is not a list of shares.", "Write numbers from 0 to 1: --kept 0.02,0.1,0.3.")
    return found
