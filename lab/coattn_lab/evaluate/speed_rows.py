"""Results of speed as rows of tables: `coattn bench`."""

from __future__ import annotations

from collections.abc import Iterable

from coattn_lab.evaluate.cells import Result, Row, method, number, size
from coattn_lab.evaluate.kind import Kind
from coattn_lab.evaluate.request_rows import BESIDE, REQUESTS, beside_rows, request_rows
from coattn_lab.evaluate.session_rows import session_rows
from coattn_lab.evaluate.wording import host_dtype

EVERY_ROW = ("random weights", "random keys and values")
"""What the caption says."""


def _decode(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        floor, step = row.get("floor_ms"), row["ms_per_step"]
        yield (
            method(row), str(row["batch"]),
            f"{step:.2f}", number(floor, ".2f"), number(step / floor if floor else None, ".2f"),
            f"{row['tokens_per_s']:.1f}", waits(row), size(row.get("gpu_kv_bytes")), size(row.get("host_kv_bytes")),
            "; ".join(word for word in row.get("simulated", ()) if word not in EVERY_ROW),
        )  # fmt: skip


def waits(row: Result) -> str:
    """The share of a step in which the GPU waited, and for whom."""
    whole = row.get("gpu_idle")
    if whole is None:
        return ""
    parts = [
        f"{name} {row[key]:.0%}"
        for key, name in (("idle_cpu", "CPU"), ("idle_pcie", "PCIe"))
        if (row.get(key) or 0) >= 0.005
    ]
    return f"{whole:.0%}" + (f" ({', '.join(parts)})" if parts else "")


def _conditions(result: Result) -> Iterable[str]:
    """What rows of speed must have in common: shapes, context, batch or GPU budget, and the numbers in DRAM."""
    memory = (result.get("memory") or {}).get("gpu_memory")
    for row in result["rows"]:
        if memory:
            room = f"{size(memory)} of GPU memory, the largest batch that fits"
        else:
            budget = row.get("gpu_budget")
            room = f"batch {row['batch']}" + (f", at most {size(budget)} of KV in GPU memory" if budget else "")
        there = host_dtype(row)
        dram = f"DRAM in {there}" if there and there != row.get("dtype") else "DRAM as the model has it"
        yield f"{row['shapes']}, {row['context']:,} tokens, {room}, {dram}"


def _ops(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        peer = row.get("torch_tokens_per_s")
        yield (
            row["kernel"], row["isa"], row["dtype"], str(row["group"]), str(row["head_size"]), str(row["threads"]),
            f"{row['gbps']:.1f}", f"{row['limit_gbps']:.1f}", f"{row['gbps'] / row['limit_gbps']:.0%}",
            number(row["tokens_per_s"] / peer if peer else None, ".2f"),
        )  # fmt: skip


def _prefill(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        cap = row.get("gpu_kv", row.get("gpu_memory"))  # the name in older results
        yield (
            str(result.get("shapes", "")), f"`{row['method']}`", size(cap) or "none",
            f"{row['tokens']:,}", f"{row['seconds']:.2f}",
            f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}", number(row.get("floor_ratio"), ".2f"),
            number(row.get("peer_ratio"), ".2f"), f"{row['kl']:.1e}",
            size(row["gpu_kv_peak"]), size(row["host_kv_peak"]),
        )  # fmt: skip


SPEED = {
    "decode": Kind(
        "Decode step",
        (
            "method",
            "batch",
            "ms",
            "floor ms",
            "x floor",
            "tokens/s",
            "GPU waits",
            "GPU KV",
            "DRAM KV",
            "also simulated",
        ),
        _decode,
        group=_conditions,
        note="Weights, keys and values are random numbers in every row. The floor is the time the step's bytes need at "
        "the rates measured in the same run. GPU waits: the share of a step, the mean over the timed steps, in which "
        "it waited for the CPU's answer or was in a kernel that only fetches KV over PCIe.",
    ),
    "prefill": Kind(
        "Prefill",
        (
            "shapes",
            "method",
            "cap",
            "tokens",
            "seconds",
            "tokens/s",
            "x first",
            "x floor",
            "x Transformers",
            "KL",
            "GPU KV",
            "DRAM KV",
        ),
        _prefill,
    ),
    "requests": Kind("Requests", REQUESTS, request_rows, note="Weights and tokens are random; all requests at once."),
    "beside": Kind("Decoding beside a prompt", BESIDE, beside_rows, note="Weights and tokens are random."),
    "sessions": Kind(
        "Sessions",
        ("shapes", "tokens", "cap", "method", "check", "measured"),
        session_rows,
        note="Weights and tokens are random. `again`: a second question about a text, and turns about it; `shared`: "
        "many questions about one; see `coattn-lab bench sessions --help`.",
    ),
    "ops": Kind(
        "CPU kernels",
        ("kernel", "isa", "dtype", "group", "head", "threads", "GB/s", "limit", "of limit", "x PyTorch"),
        _ops,
        note="The limit is a random gather of the same bytes, measured in the same run.",
    ),
}
"""In the order of the page."""
