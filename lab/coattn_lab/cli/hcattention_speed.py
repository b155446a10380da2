"""The tables of `coattn-lab bench hcattention` that measure speed."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from coattn.cli.options import parse_settings
from coattn.cli.output import out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.units import format_bytes, parse_bytes


def run(options: dict[str, Any]) -> None:
    """Measures, prints, writes."""
    from coattn.hf.load import choose_device
    from coattn.provenance import provenance

    path, device = writable(options["target"]), choose_device(options["device"])
    if options["name"] == "kernels" and device.type != "cuda":
        raise ConfigError("The kernels are a GPU's, and this machine has none.", "See `coattn doctor`.")
    made = {"kernels": kernels, "long": long, "prompt": prompt}[options["name"]](options, device)
    result = {"bench": "hcattention", "table": options["name"], **made, **provenance()}
    save(path, result)
    if options["as_json"]:
        print_json(result)
    else:
        show(result)


def kernels(options: dict[str, Any], device: Any) -> dict[str, Any]:
    """Scores and top-p of one layer, beside the memory's limit and attention over 16-bit keys and values."""
    from coattn_lab.bench import limits, pq_kernels

    hbm = limits.hbm_gbps(device)
    rows = []
    with progress("kernels", len(options["context"]) * len(pq_kernels.FORMS)) as bar:
        for row in pq_kernels.run(options["context"], options["kept"], hbm, device):
            rows.append(row)
            bar.advance(bar.task_ids[0])
    numbers = f"random codes and scores: {options['kept']:.1%} of the tokens kept"
    return {"rows": rows, "hbm_gbps": hbm, "simulated": [numbers]}


def long(options: dict[str, Any], device: Any) -> dict[str, Any]:
    """Decode steps over KV that was filled directly."""
    import torch

    from coattn.hf.load import choose_dtype
    from coattn.hf.random_model import random_model
    from coattn_lab.bench import hc_long, limits
    from coattn_lab.bench.decode import Bench

    names = options["rows"].split(",")
    unknown = [name for name in names if name not in hc_long.FORMS]
    if unknown:
        raise ConfigError(f"There is no row {unknown[0]!r}.", f"There are: {', '.join(hc_long.FORMS)}.")
    found = limits.measure(device) if device.type == "cuda" else limits.measure(device, 256 << 20)
    most = parse_bytes(options["gpu_memory"], "--gpu-memory")
    if device.type == "cuda" and most is not None:
        # PyTorch refuses to take more than this, weights and everything included
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
    model = random_model(options["shapes"], device, choose_dtype("auto", device))
    bench = Bench(model, options["shapes"], found, None, options["steps"] + 8)
    rows = []
    with progress("long", len(names)) as bar:
        for name in names:
            form = {**hc_long.FORMS[name], **parse_settings(options["settings"])}
            rows.append(hc_long.measure(bench, name, form, options["kept"], options["steps"], 20.0))
            bar.advance(bar.task_ids[0])
            bench.rest()
    return {"shapes": options["shapes"], "rows": rows, "limits": found}


def prompt(options: dict[str, Any], device: Any) -> dict[str, Any]:
    """A prompt read block by block, and decode steps after it."""
    from coattn.hf.load import choose_dtype
    from coattn.hf.random_model import random_model
    from coattn_lab.bench import hc_long

    model = random_model(options["shapes"], device, choose_dtype("auto", device))
    block, anchor = options["block"], options["anchor"]
    params = parse_settings(options["settings"])
    row = hc_long.prompt(model, options["tokens"], block, block if anchor is None else anchor, options["steps"], params)
    return {"shapes": options["shapes"], "rows": [row]}


KERNELS = "context groups code_bits centroid_bits score_us score_gbps share_of_hbm top_p_us both_us kept_share"
LONG = "row context ms_per_step floor_ms kept_share gpu_kv_bytes host_kv_bytes gpu_bytes_in_use fill_s"
PROMPT = "tokens block anchor prefill_s ms_per_step kept_share gpu_kv_bytes host_kv_bytes"
COLUMNS = {
    "kernels": [*KERNELS.split(), "triton_score_us", "attention_16_bit_us"],
    "long": LONG.split(),
    "prompt": PROMPT.split(),
}


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(title=f"hcattention, {result['table']}")
    columns = COLUMNS[result["table"]]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in result["rows"]:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    out.print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if "bytes" in column:
        return format_bytes(value)
    if "share" in column:
        return f"{value:.1%}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
