"""`coattn-lab bench requests`: a stream of requests, from arrival to last token."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.options import Count, Number, is_given, json_option, parse_settings
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.part import MOST_BATCH
from coattn.units import format_bytes, parse_bytes
from coattn_lab.cli.groups import bench, empty_table


@bench.command()
@click.option("--model", help="smollm2, a model folder or a hub name; its tokens are random all the same.")
@click.option("--shapes", default="qwen3-8b", show_default=True, help="Model shapes by name, with random weights.")
@click.option("--methods", default="full", show_default=True, help="With commas.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of every method; repeatable.")
@click.option("--count", default=24, show_default=True, type=Count(1), help="Requests.")
@click.option("--prompts", default="uniform:4096:30720", show_default=True, help="Tokens of prompts: fixed:N, "
              "uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.")  # fmt: skip
@click.option("--new", default="fixed:64", show_default=True, help="New tokens, likewise.")
@click.option("--arrivals", default="burst", show_default=True, help="burst, every:SECONDS or poisson:PER_SECOND.")
@click.option("--seed", default=0, show_default=True, type=Count(0), help="Of lengths, arrivals and tokens.")
@click.option("--gpu-kv", metavar="SIZE", help="The cap on GPU KV memory.")
@click.option("--host-kv", metavar="SIZE", help="The cap on KV memory in DRAM.")
@click.option("--max-batch", default=16, show_default=True, type=Count(1), help="Sequences that run at a time.")
@click.option("--chunk", type=Count(1), help="Prompt tokens of a step; default: set by --target-ms.")
@click.option("--target-ms", type=Number(0, min_open=True), help="Most time between two tokens while prompts are read.")
@click.option("--change", type=Number(0, 0.9), help="Drive picks by digests in DRAM: share of blocks new in a step; "
              "random weights have no locality.")  # fmt: skip
@click.option("--wrong", default=0.05, show_default=True, type=Number(0, 1), help="With --change: scores mispredicted.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--no-floor", is_flag=True, help="Leave the floor out, and the measurements it needs.")
@click.option("--out", "target", metavar="FILE", help="Also write the JSON there.")
@json_option
def requests(target: str | None, as_json: bool, **options: Any) -> None:
    """Time to the first token and between tokens, tokens/s, queueing and preemptions of a stream of requests."""
    path = writable(target)
    if is_given("model") and is_given("shapes"):
        raise ConfigError("Both --model and --shapes are given.", "Leave one out.")
    if options["max_batch"] > MOST_BATCH:
        raise ConfigError(f"--max-batch is {options['max_batch']:,}.", f"Give {MOST_BATCH:,} or less.")

    from coattn.hf.load import choose_device, choose_dtype, load
    from coattn.method.table import find_method
    from coattn.provenance import provenance
    from coattn_lab.bench import requests as bench_requests
    from coattn_lab.bench import stream
    from coattn_lab.bench.random_model import random_model

    names = options["methods"].split(",")
    params = parse_settings(options["settings"])
    methods = [(find_method(name).name, params) for name in names]
    items = stream.draw(options["count"], options["prompts"], options["new"], options["arrivals"], options["seed"])
    given = {name: options[name] for name in ("chunk", "target_ms") if options[name] is not None}
    setting = bench_requests.Setting(
        options["max_batch"],
        max(item.prompt_tokens + item.new_tokens for item in items),
        parse_bytes(options["gpu_kv"], "--gpu-kv"),
        parse_bytes(options["host_kv"], "--host-kv"),
        given,
        options["change"],
        options["wrong"],
    )
    device = choose_device(options["device"])
    if options["model"]:
        model: Any = load(options["model"], dtype=options["dtype"], device=device).model
    else:
        model = random_model(options["shapes"], device, choose_dtype(options["dtype"], device))
    floor = None if options["no_floor"] else bench_requests.floor_s(model, items, setting.max_batch)
    rows: list[dict[str, Any]] = []
    with progress("rows", len(methods)) as bar:
        for row in bench_requests.rows_of(model, methods, items, setting, options["seed"]):
            if floor is not None and "total_s" in row:
                row["floor_ratio"] = row["total_s"] / floor["floor_s"]
            rows.append(row)
            keep(path, rows=rows)
            bar.advance(bar.task_ids[0])
    simulated = ["random tokens"] if options["model"] else ["random weights", "random tokens"]
    if any(row.get("driven") for row in rows):
        simulated.append(f"driven picks: {setting.change:.1%} of the blocks change in a step, "
                         f"{setting.wrong:.0%} of the scores predicted wrongly")  # fmt: skip
    result = {
        "rows": rows,
        "model": options["model"] or options["shapes"],
        "stream": stream.describe(items),
        "seed": options["seed"],
        "max_batch": setting.max_batch,
        "gpu_kv": setting.gpu_kv,
        "host_kv": setting.host_kv,
        "options": given,
        "floor": floor,
        "simulated": simulated,
        **provenance(),
    }
    save(path, result)
    if as_json:
        print_json(result)
        return
    show(result)


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    title = f"{result['model']}, {len(result['stream'])} requests, {'; '.join(result['simulated'])}"
    heads = "seconds | x floor | tokens/s | first token, s | p99 | between, ms | p99 | queue, s | preempted | failed"
    table = empty_table(title, "method", f"{heads} | GPU KV | DRAM KV")
    for row in result["rows"]:
        if "refused" in row:
            table.add_row(row["method"], row["refused"])
            continue
        table.add_row(
            row["method"], _number(row["total_s"], ".2f"),
            _number(row.get("floor_ratio"), ".2f"),
            _number(row["tokens_per_s"], ",.1f"),
            _number(row["ttft_median_s"], ".2f"),
            _number(row["ttft_p99_s"], ".2f"),
            _number(row["between_median_s"], ".1f", 1e3), _number(row["between_p99_s"], ".1f", 1e3),
            _number(row["queue_median_s"], ".2f"), str(row["preemptions"]), str(row["failed"]),
            *(format_bytes(row[f"{tier}_kv_peak"]) if f"{tier}_kv_peak" in row else "" for tier in ("gpu", "host")),
        )  # fmt: skip
    out.print(table)


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)
