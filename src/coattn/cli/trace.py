"""`coattn trace`: where the time of a decode step goes, as a picture and as a Chrome trace."""

import json
from typing import Any

import click

from coattn.cli.options import (
    compose_method,
    count_option,
    fits,
    json_option,
    load_model,
    method_options,
    model_options,
    text_option,
)
from coattn.cli.output import print_json, print_line, tell, writable
from coattn.errors import ConfigError
from coattn.part import MOST_BATCH
from coattn.text import read_text

WARM_UP_STEPS = 3
"""Decode steps before the first one in the trace."""
CHUNK_TOKENS = 2048
"""Prompt tokens per step."""


@click.command()
@model_options
@method_options("cpu")
@count_option("--batch", 1, "Number of sequences.", most=MOST_BATCH)
@count_option("--context", 2048, "Length of each in tokens.", 8)
@text_option
@count_option("--steps", 4, "Decode steps in the Chrome trace.", most=1000)
@click.option("--out", "target", default="trace.json", metavar="FILE", help="Write the Chrome trace here.")
@json_option
def trace(target: str, as_json: bool, **options: Any) -> None:
    """Show where the time of a decode step goes: GPU, CPU workers and PCIe, and the bytes over each link.

    Writes a Chrome trace (open it in chrome://tracing or Perfetto), and a picture next to it.
    """
    path = writable(target)
    assert path is not None

    import torch

    from coattn.hf.sketches import with_sketches
    from coattn.provenance import provenance
    from coattn.step.trace.files import chrome_trace, timeline
    from coattn.tools.bench import prompts
    from coattn.tools.evaluate.steps import Steps

    composed = compose_method(options)
    text, batch, context = read_text(options["text_file"]), options["batch"], options["context"]
    first = context - WARM_UP_STEPS - options["steps"]
    if first < 1:
        raise ConfigError(f"--context {context} is too short for {options['steps']} steps.", "Give a longer context.")
    loaded = load_model(options, check=fits("--context", context, options["model"]))
    if loaded.model.device.type == "cpu":
        tell('This runs on the CPU alone: "GPU" in the trace is the part that a GPU would run.')
    composed = with_sketches(composed, loaded)
    windows = torch.tensor(prompts(loaded, text, [context] * batch))
    steps = []
    budgets = (options["gpu_kv"], options["host_kv"])
    with Steps(loaded.model, windows, composed.method, *budgets, dict(composed.params)) as runner:
        runner.read(first, CHUNK_TOKENS)
        for at in range(first, context):
            runner.decode(at)
            step = runner.runner.trace()
            if at >= first + WARM_UP_STEPS and step is not None:
                steps.append(step)
    title = f"{options['method']}, {loaded.name}, batch {options['batch']}, {options['context']:,} tokens"
    picture = path.with_suffix(".png")
    path.write_text(json.dumps(chrome_trace(steps)) + "\n")
    timeline(steps[-1], title, picture)
    tell(f"wrote {path} and {picture}")
    last = steps[-1].as_dict()
    if as_json:
        print_json({"method": options["method"], "steps": [step.as_dict() for step in steps], **provenance()})
        return
    print_line(
        f"{title}: {last['ms']:.2f} ms a step, GPU waiting {last['gpu_idle']:.0%} (for the CPU "
        f"{last['cpu_wait']:.0%}, for PCIe {last['pcie_wait']:.0%}), CPU busy {last['cpu_busy']:.0%}; "
        f"HBM {last['hbm_gbps']:.0f}, PCIe {last['pcie_gbps']:.2f}, DRAM {last['dram_gbps']:.1f} GB/s"
    )
