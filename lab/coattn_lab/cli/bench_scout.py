"""`coattn-lab bench scout`: the ScoutAttention paper's figures on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from coattn.cli.options import Count, Number, json_option, numbers, parse_settings
from coattn.cli.output import out, print_json, save, writable
from coattn.errors import ConfigError
from coattn.units import parse_bytes
from coattn_lab.cli.bench_decode import collect, seconds_option, show
from coattn_lab.cli.groups import bench


@bench.command()
@click.option("--figure", default="8", show_default=True, help="Of the paper: 2, 3, 6, 8 to 12.")
@click.option("--shapes", default="qwen3-14b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--context", default="8192,65536", show_default=True, callback=numbers, help="Context lengths.")
@click.option("--batch", default="64", show_default=True, callback=numbers, help="Batch sizes, or the largest to try.")
@click.option("--methods", help="Figure 8: only these rows, with commas.")
@click.option("--budget", default=2048, show_default=True, type=Count(96), help="Tokens attended per KV head.")
@click.option("--change", default=0.124, show_default=True, type=Number(0, 0.9), help="Block change rate.")
@click.option("--wrong", default=0.05, show_default=True, type=Number(0, 1), help="Share of scores predicted wrongly.")
@click.option("--gpu-memory", metavar="SIZE", help="Memory of the GPU, weights included; default: all there is.")
@click.option("--host-kv", metavar="SIZE", help="Most KV memory in DRAM; default: no limit.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of scout.")
@click.option("--steps", default=48, show_default=True, type=Count(4), help="Most steps per row.")
@seconds_option(4.0)
@click.option("--model", default="smollm2", show_default=True, help="Figure 6: a model with real weights.")
@click.option("--dtype", default="auto", show_default=True, help="Of that model.")
@click.option("--text", "text_file", metavar="FILE", help="Figure 6: a text; default: Python's help topics.")
@click.option("--prefill", default=4096, show_default=True, type=Count(1), help="Tokens of it that are read.")
@click.option("--decode", default=128, show_default=True, type=Count(1), help="Decode steps that follow.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def scout(target: str | None, as_json: bool, **options: Any) -> None:
    """The figures of the ScoutAttention paper, with this machine's shapes and links in place of the paper's.

    Random weights pick blocks at random, so the picks are driven to --change: every row says what change rate,
    CPU ratio and recall traffic were measured.

    \b
    2       reading DRAM from the GPU by size of the piece
    3, 11   how long the GPU waits, beside hgca and infinigen at the same batch
    6       the CPU's share of the budget, step by step, with recall and without; of a real model
    8       throughput by context, each method with the largest batch that fits
    9       throughput by batch size, beside hgca and infinigen
    10      throughput by block size
    12      without pre-computation, without recall, without both
    """
    from coattn.hf.load import choose_device
    from coattn.method.row import compose
    from coattn.method.table import find_method
    from coattn_lab.bench import scout as bench_scout

    path, figure = writable(target), options["figure"]
    known = ("2", "6", *bench_scout.FIGURES)
    if figure not in known:
        raise ConfigError(f"The paper's figure {figure} is no benchmark here.", f"There are: {', '.join(known)}.")
    options["given"] = parse_settings(options["settings"])
    compose(find_method("scout"), **{"budget": options["budget"], **options["given"]})  # refuses before the work
    if figure == "6":
        result = on_a_model(options)
    elif figure == "2":
        result = pieces(choose_device(options["device"]))
    else:
        result = speed(figure, {**options, "device": choose_device(options["device"])}, path)
    result = {"figure": figure, **result}
    save(path, result)
    if as_json:
        print_json(result)
    elif "rows" in result:
        show_rows(result)
    else:
        out.print_json(json.dumps(result["found"]))


def speed(figure: str, options: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The rows of a figure of speed; one model for all of them. path: where they are kept as they come."""
    import torch

    from coattn.hf.architectures import describe_layers
    from coattn.hf.load import choose_dtype
    from coattn.method.table import METHODS
    from coattn.provenance import provenance
    from coattn_lab.bench import limits
    from coattn_lab.bench import scout as bench_scout
    from coattn_lab.bench.random_model import random_model

    device = options["device"]
    found = limits.measure(device) if device.type == "cuda" else limits.measure(device, 256 << 20)
    model = random_model(options["shapes"], device, choose_dtype("auto", device))
    whole = parse_bytes(options["gpu_memory"], "--gpu-memory")
    if whole is None and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
    weights = sum(p.nbytes for p in model.parameters())
    gpu = None if whole is None else whole - weights - bench_scout.RESERVE
    if gpu is not None and gpu <= 0:
        raise ConfigError("The weights alone do not fit in --gpu-memory.", "Give more, or smaller --shapes.")
    host = parse_bytes(options["host_kv"], "--host-kv")
    asked = bench_scout.Asked(
        options["context"], options["batch"], options["budget"], options["change"], options["wrong"], options["given"]
    )
    cases = bench_scout.FIGURES[figure](asked, bench_scout.Fits(describe_layers(model), gpu, host))
    if options["methods"]:
        wanted, there = options["methods"].split(","), {case.method for case in cases}
        unknown = [name for name in wanted if name not in METHODS]
        if unknown:
            raise ConfigError(f"There is no method {unknown[0]!r}.", f"The figure has: {', '.join(sorted(there))}.")
        cases = [case for case in cases if case.method in wanted]
    if not cases:
        raise ConfigError("Not one sequence of any row fits.", "Give more memory, or a shorter --context.")
    run = bench_scout.ScoutBench(model, options["shapes"], found, gpu, options["steps"], host)
    memory = {"gpu_memory": whole, "gpu_kv": gpu, "host_kv": host, "reserve": bench_scout.RESERVE}
    made = {
        "figure": figure,
        "rows": [],
        "limits": found,
        "weight_bytes": run.weights.of(1),
        "memory": memory,
        **provenance(),
    }
    collect(run, cases, options["seconds"], f"figure {figure}", path, made)
    return {**made, "speedups": bench_scout.speedups(made["rows"])}


def pieces(device: Any) -> dict[str, Any]:
    """GB/s of gathering pieces of DRAM from the GPU, by size."""
    if device.type != "cuda":
        raise ConfigError("Figure 2 is about PCIe.", "Run it on a machine with a GPU.")
    import torch

    from coattn.cache.host_memory import host_memory
    from coattn.provenance import provenance
    from coattn_lab.bench.limits import HOST_BYTES
    from coattn_lab.bench.read_kernel import read_gbps

    memory = host_memory(HOST_BYTES // 4, device).view(torch.int32)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    sizes = [512, 1024, 4096, 16384, 65536, 131072]
    return {"found": {str(n): read_gbps(memory, n // 4, programs, gather=True) for n in sizes}, **provenance()}


def on_a_model(options: dict[str, Any]) -> dict[str, Any]:
    """Figure 6: what the CPU has of a real model's budget on a text."""
    from coattn.cli.evaluate import prepare
    from coattn.provenance import provenance
    from coattn_lab.evaluate.cpu_share import cpu_shares

    subject = prepare({**options, "length": None, "start": 0, "stride": None})
    model, ids, windows = subject.loaded.model, subject.ids, subject.windows
    params = {**options["given"], "budget": options["budget"]}
    found = {
        name: cpu_shares(model, ids, windows, **{**params, **more})
        for name, more in (("recall", {}), ("without", {"recall_interval": 0}))
    }
    return {"found": found, **subject.config(), **provenance()}


def show_rows(result: dict[str, Any]) -> None:
    """The table for people, with what drives it."""
    show(result)
    for row in result["rows"]:
        notes = row["notes"]
        if "change" in notes:
            name = f"scout{' ' + row['params']['schedule'] if 'schedule' in row['params'] else ''}"
            out.print(
                f"{name} batch {row['batch']} at {row['context']:,} {row['params']}: change {notes['change']:.1%}, "
                f"CPU {notes['cpu_of_budget']:.1%} of the budget, recall {notes['recalled_bytes'] / 1e6:.1f} MB/step, "
                f"{notes.get('recomputed_heads', 0):.0f} of {notes.get('checked_heads', 0):.0f} heads attended again",
                highlight=False,
                soft_wrap=True,
            )
    for each in result["speedups"]:
        out.print(
            f"scout batch {each['batch']} at {each['context']:,}: {each['times']:.2f}x {each['over']} "
            f"(batch {each['its_batch']})",
            highlight=False,
        )
