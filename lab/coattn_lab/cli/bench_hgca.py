"""`coattn-lab bench hgca`: the HGCA paper's figures on this machine."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.options import Count, json_option, numbers
from coattn.cli.output import out, print_json, save, writable
from coattn.errors import ConfigError
from coattn_lab.cli.bench_decode import measure, seconds_option, shares, show
from coattn_lab.cli.groups import bench


@bench.command()
@click.option("--figure", default="12", show_default=True, help="Of the paper: 6, 10, 11, 12, 13 or 15.")
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name; the weights are random.")
@click.option("--batch", default="1,4", show_default=True, callback=numbers, help="Batch sizes.")
@click.option("--context", default="8192,32768", show_default=True, callback=numbers, help="Context lengths.")
@click.option("--window", default=4096, show_default=True, type=Count(32), help="Tokens that stay on the GPU.")
@click.option(
    "--kept", default="0.02,0.25,0.5", show_default=True, help="Shares of DRAM's entries that heads attend to."
)
@click.option("--gpu-kv", metavar="SIZE", help="Most KV memory in the GPU tier; default: no limit.")
@click.option("--steps", default=64, show_default=True, type=Count(4), help="Most steps per row.")
@seconds_option(10.0)
@click.option("--peers", is_flag=True, help="Figure 12: add Transformers with its full and its offloaded cache.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def hgca(target: str | None, as_json: bool, **options: Any) -> None:
    """The figures of the HGCA paper, with this machine's shapes and links in place of the paper's.

    \b
    6   attention over KV in host memory: loaded to the GPU, or attended on the CPU
    10  hybrid attention against loading, by tokens on the GPU and in DRAM
    11  where the time of a layer's attention goes
    12  generation by batch size, beside other methods
    13  time between tokens as a sequence grows; 15 the same, of long ones
    """
    from coattn.hf.load import choose_device
    from coattn_lab.bench import hgca as bench_hgca
    from coattn_lab.bench.peer import PEERS

    path, device = writable(target), choose_device(options["device"])
    if options["figure"] not in bench_hgca.FIGURES:
        known = ", ".join(bench_hgca.FIGURES)
        raise ConfigError(f"The paper's figure {options['figure']} is no benchmark here.", f"There are: {known}.")
    peers = (PEERS if device.type == "cuda" else PEERS[:1]) if options["peers"] else ()
    asked = bench_hgca.Asked(
        options["batch"], options["context"], options["window"], shares(options["kept"]), tuple(peers)
    )
    cases = bench_hgca.FIGURES[options["figure"]](asked)
    result = {
        "figure": options["figure"],
        **measure(cases, {**options, "device": device}, f"figure {options['figure']}", path),
    }
    rows = result["rows"]
    result["speedups"] = bench_hgca.speedups(rows)
    save(path, result)
    if as_json:
        print_json(result)
        return
    show(result)
    for done in rows:
        if done["layer_us"]:
            parts = ", ".join(f"{name} {value:.0f}" for name, value in done["layer_us"].items())
            out.print(
                f"{done['method']} batch {done['batch']} at {done['context']:,}: a layer's us: {parts}", highlight=False
            )
    for each in result["speedups"]:
        out.print(
            f"{each['method']} batch {each['batch']} at {each['context']:,}, window {each['window']:,}: "
            f"{each['times_offload']:.1f}x offload",
            highlight=False,
        )
