"""`coattn trace`: where the time of a decode step goes, as a picture and as a Chrome trace."""

from __future__ import annotations

import json
from typing import Any

import click

from coattn.cli.options import Count, json_option, method_options, model_options, parse_settings
from coattn.cli.output import err, model_progress, out, print_json, writable
from coattn.errors import ConfigError
from coattn.part import MOST_BATCH
from coattn.text import read_text

WARM = 3
"""Decode steps before the first that is shown."""
CHUNK = 2048
"""Prompt tokens per step."""


@click.command()
@model_options
@method_options("cpu")
@click.option("--batch", default=1, show_default=True, type=Count(1, MOST_BATCH), help="Sequences.")
@click.option("--context", default=2048, show_default=True, type=Count(8), help="Tokens of each.")
@click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python.")
@click.option("--steps", default=4, show_default=True, type=Count(1, 1000), help="Steps in the Chrome trace.")
@click.option("--out", "target", default="trace.json", show_default=True, metavar="FILE", help="The Chrome trace.")
@json_option
def trace(target: str, as_json: bool, **options: Any) -> None:
    """One decode step's timeline: GPU, CPU workers and PCIe, and the bytes over each link.

    Writes a Chrome trace (open it in chrome://tracing or Perfetto) and a picture beside it.
    """
    path = writable(target)
    assert path is not None

    import torch

    from coattn.hf.load import load
    from coattn.method.row import compose
    from coattn.method.table import find_method
    from coattn.provenance import provenance
    from coattn.step.trace.chrome import chrome_trace
    from coattn.step.trace.figure import timeline
    from coattn.tools.bench import prompts
    from coattn.tools.evaluate.steps import Steps

    params = parse_settings(options["settings"])
    method = find_method(options["method"])
    compose(method, **params)
    text, batch, context = read_text(options["text_file"]), options["batch"], options["context"]
    first = context - WARM - options["steps"]
    if first < 1:
        raise ConfigError(f"--context {context} is too short for {options['steps']} steps.", "Give a longer one.")
    with model_progress() as show:
        loaded = load(options["model"], dtype=options["dtype"], device=options["device"], on_progress=show)
    if loaded.model.device.type == "cpu":
        err.print("On the CPU alone: what would run on a GPU runs there too, layer by layer, and is called GPU.")
    windows = torch.tensor(prompts(loaded, text, [context] * batch))
    steps = []
    with Steps(loaded.model, windows, method, options["gpu_kv"], options["host_kv"], params) as runner:
        runner.read(first, CHUNK)
        for at in range(first, context):
            runner.decode(at)
            step = runner.runner.trace()
            if at >= first + WARM and step is not None:
                steps.append(step)
    title = f"{options['method']}, {loaded.name}, batch {options['batch']}, {options['context']:,} tokens"
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
