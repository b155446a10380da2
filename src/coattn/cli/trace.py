"""`coattn trace`: where the time of a decode step goes, as a picture and as a Chrome trace."""

from __future__ import annotations

import json
from typing import Any

import click

from coattn.cli.options import Count, json_option, parse_settings
from coattn.cli.output import err, out, print_json, writable
from coattn.part import MOST_BATCH
from coattn.units import parse_bytes


@click.command()
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--method", default="cpu", show_default=True, help="A row of `coattn methods`.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
@click.option("--batch", default=1, show_default=True, type=Count(1, MOST_BATCH), help="Sequences.")
@click.option("--context", default=8192, show_default=True, type=Count(8), help="Tokens of each.")
@click.option("--gpu-kv", metavar="SIZE", help="Most KV memory in the GPU tier; default: no limit.")
@click.option("--steps", default=4, show_default=True, type=Count(1, 1000), help="Steps in the Chrome trace.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", default="trace.json", show_default=True, metavar="FILE", help="The Chrome trace.")
@json_option
def trace(target: str, as_json: bool, **options: Any) -> None:
    """One decode step's timeline: GPU, CPU workers and PCIe, and the bytes over each link.

    Writes a Chrome trace (open it in chrome://tracing or Perfetto) and a picture beside it.
    """
    path = writable(target)
    assert path is not None

    from coattn.bench import decode, limits
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.hf.random_model import random_model
    from coattn.method import compose
    from coattn.methods import find_method
    from coattn.provenance import provenance
    from coattn.trace.chrome import chrome_trace
    from coattn.trace.figure import timeline

    params = parse_settings(options["settings"])
    compose(find_method(options["method"]), **params)
    device = choose_device(options["device"])
    if device.type == "cpu":
        err.print("On the CPU alone: what would run on a GPU runs there too, layer by layer, and is called GPU.")
    model = random_model(options["shapes"], device, choose_dtype("auto", device))
    warm = 3
    cap = parse_bytes(options["gpu_kv"], "--gpu-kv")
    bench = decode.Bench(model, options["shapes"], limits.NONE, cap, options["steps"] + warm)
    case = decode.Case(options["method"], options["batch"], options["context"], params)
    steps = []
    with bench.prepared(case) as ready:
        for i in range(warm + options["steps"]):
            ready.step()
            found = ready.runner.trace()
            if i >= warm and found is not None:
                steps.append(found)
    title = f"{options['method']}, {options['shapes']}, batch {options['batch']}, {options['context']:,} tokens"
    picture = path.with_suffix(".png")
    path.write_text(json.dumps(chrome_trace(steps)) + "\n")
    timeline(steps[-1], title, picture)
    err.print(f"wrote {path} and {picture}")
    last = steps[-1].as_dict()
    if as_json:
        print_json({"method": options["method"], "steps": [step.as_dict() for step in steps], **provenance()})
        return
    out.print(
        f"{title}: {last['ms']:.2f} ms a step, GPU waiting {last['gpu_idle']:.0%} (for the CPU "
        f"{last['cpu_wait']:.0%}, for PCIe {last['pcie_wait']:.0%}), CPU busy {last['cpu_busy']:.0%}; "
        f"HBM {last['hbm_gbps']:.0f}, PCIe {last['pcie_gbps']:.2f}, DRAM {last['dram_gbps']:.1f} GB/s",
        highlight=False,
    )
