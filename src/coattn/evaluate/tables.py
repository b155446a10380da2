"""Results as rows of Markdown tables: one kind of result, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coattn.units import format_bytes

Result = Mapping[str, Any]
Row = Sequence[str]


@dataclass(frozen=True)
class Kind:
    """title: of the section. head: of the table. rows: one result -> its rows. short: those that fit in a README."""

    title: str
    head: Sequence[str]
    rows: Callable[[Result], Iterable[Row]]
    short: Callable[[Result], Iterable[Row]] | None = None
    note: str = ""


def kind_of(result: Result) -> str | None:
    """Which kind of result this is; None for anything else."""
    name = result.get("evaluation")
    if name in KINDS:
        return str(name)
    if result.get("bench"):  # the tables of a paper: its page in docs/methods has them
        return None
    rows = result.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    return next((kind for kind, key in MARKS.items() if key in first), None)


def markdown(head: Sequence[str], rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def method(result: Result) -> str:
    """The method and what was set: `streaming, GPU 1/8`."""
    parts = [f"`{result.get('method', '')}`"]
    share, memory = result.get("gpu_share"), result.get("gpu_kv") or result.get("gpu_memory")
    if share:
        parts.append(f"GPU {share:.3g} of KV")
    if memory:
        parts.append(f"GPU {memory}")
    params = result.get("params") or {}
    parts += [
        f"{name}={params[name]}" for name in ("budget", "recent", "window_blocks") if params.get(name) is not None
    ]
    return ", ".join(parts)


def number(value: Any, style: str = "") -> str:
    """A number in a format; empty where there is none."""
    return "" if value is None else format(value, style)


def size(value: Any) -> str:
    """Bytes for people; empty where there are none."""
    return "" if value is None else format_bytes(value)


def model(result: Result) -> str:
    """The model and its dtype."""
    return f"{result.get('model', '')} ({result.get('dtype', '')})"


def _needle(result: Result) -> Iterable[Row]:
    by = ", ".join(f"{each['length']:,}: {each['found']}/{each['total']}" for each in result["by_length"])
    what = "pass key" if result.get("keys", 1) == 1 else f"{result['keys']} keys"
    what = "needles of a file" if result.get("needles") else what
    yield model(result), method(result), what, f"{result['found']} of {result['total']}", by


def _fidelity(result: Result) -> Iterable[Row]:
    yield (
        model(result), method(result), number(result.get("length"), ","), number(result.get("kl"), ".3g"),
        number(result.get("top1"), ".1%"), number(result.get("top5"), ".1%"), number(result.get("cosine"), ".4f"),
        number(result.get("mass"), ".1%"), number(result.get("share_attended"), ".1%"),
        number(result.get("cpu_ratio"), ".0%"),
    )  # fmt: skip


def _perplexity(result: Result) -> Iterable[Row]:
    decode = result.get("decode") or {}
    interval = decode.get("ratio_95")
    spread = f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
    yield (
        model(result), method(result), number(result.get("length"), ","), number(result.get("perplexity"), ".3f"),
        number(result.get("perplexity_full"), ".3f"), number(result.get("ratio"), ".4f"),
        number(decode.get("ratio"), ".4f") + spread, number(result.get("tokens"), ","),
    )  # fmt: skip


def _sweep(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        interval = row.get("ratio_95")
        spread = f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
        kept = [row.get(f"kept_{name}") for name in ("lowest", "median", "highest")]
        yield (
            model(result), f"`{row['row']}`", str((result.get("text") or {}).get("name", "")),
            number(result.get("length"), ","), number(row["ratio"], ".4f") + spread, number(row["kl"], ".2g"),
            number(row["top1"], ".1%"), number(row["attended_near"] + row["attended_far"], ",.0f"),
            number(row["attended_far"], ",.0f"), " / ".join(number(x, ".1%") for x in kept if x is not None),
        )  # fmt: skip


def _scores(result: Result) -> Iterable[Row]:
    for task in result["tasks"]:
        yield model(result), method(result), task["task"], str(task["items"]), number(task["score"], ".2f")
    yield from _mean(result)


def _mean(result: Result) -> Iterable[Row]:
    count = sum(task["items"] for task in result["tasks"])
    yield model(result), method(result), "mean", str(count), number(result.get("mean"), ".2f")


def _decode(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        floor, step = row.get("floor_ms"), row["ms_per_step"]
        params = " ".join(f"{name}={value}" for name, value in row.get("params", {}).items())
        yield (
            row["shapes"], f"`{row['method']}` {params}".strip(), str(row["batch"]), f"{row['context']:,}",
            f"{step:.2f}", number(floor, ".2f"), number(step / floor if floor else None, ".2f"),
            f"{row['tokens_per_s']:.1f}",
            number(row.get("gpu_idle"), ".0%"), size(row.get("gpu_kv_bytes")), size(row.get("host_kv_bytes")),
        )  # fmt: skip


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
            f"{row['tokens_per_s']:,.0f}", f"{row['ratio']:.2f}", f"{row['kl']:.1e}",
            size(row["gpu_kv_peak"]), size(row["host_kv_peak"]),
        )  # fmt: skip


def _attention(result: Result) -> Iterable[Row]:
    locality, drift, query = (result.get(name) or {} for name in ("locality", "drift", "query_ahead"))
    needed = (
        f"{locality['entries_mean']:,.0f} ({locality['share_mean']:.1%}) for {locality['mass']:.0%}" if locality else ""
    )
    change = ", ".join(f"{number(_of(drift, name), '.1%')} by {label}" for name, label in DRIFTS if _of(drift, name))
    names = ("norm_rope", "norm", "rope", "neither")
    cosine = ", ".join(number(_of(query, name), ".3f") or "-" for name in names) if query else ""
    yield model(result), number(result.get("length"), ","), needed, change, cosine


def _of(found: Result, name: str) -> float | None:
    value = (found.get(name) or {}).get("mean")
    return None if value is None else float(value)


DRIFTS = (("mass", "mass"), ("bound", "bound"))
SCORES = ("model", "method", "dataset", "items", "score")

KINDS = {
    "needle": Kind("Needle", ("model", "method", "hidden", "found", "found by length"), _needle, _needle),
    "fidelity": Kind(
        "Fidelity to full attention",
        ("model", "method", "tokens", "KL", "top-1", "top-5", "cosine", "mass", "attended", "CPU"),
        _fidelity,
        _fidelity,
    ),
    "perplexity": Kind(
        "Perplexity",
        ("model", "method", "tokens", "perplexity", "full", "ratio", "ratio of decode steps", "scored"),
        _perplexity,
        _perplexity,
    ),
    "sweep": Kind(
        "Perplexity of decode steps, many rows",
        (
            "model",
            "row",
            "text",
            "tokens",
            "ratio to full",
            "KL",
            "top-1",
            "attended",
            "of it in DRAM",
            "kept of DRAM: lowest, median, highest head",
        ),
        _sweep,
        _sweep,
        note="Entries attended are those per KV head in the last step.",
    ),
    "attention": Kind(
        "Attention",
        ("model", "tokens", "entries a head needs", "blocks that change per step", "query cosine one layer ahead"),
        _attention,
        note="The cosines are with norm and RoPE, without RoPE, without norm, without both.",
    ),
    "longbench": Kind("LongBench", SCORES, _scores, _mean),
    "ruler": Kind("RULER", SCORES, _scores, _mean),
    "decode": Kind(
        "Decode step",
        (
            "shapes",
            "method",
            "batch",
            "context",
            "ms",
            "floor ms",
            "x floor",
            "tokens/s",
            "GPU idle",
            "GPU KV",
            "DRAM KV",
        ),
        _decode,
        _decode,
        note="The floor is the time the step's bytes need at the rates measured in the same run.",
    ),
    "prefill": Kind(
        "Prefill",
        ("shapes", "method", "cap", "tokens", "seconds", "tokens/s", "x first", "KL", "GPU KV", "DRAM KV"),
        _prefill,
    ),
    "ops": Kind(
        "CPU kernels",
        ("kernel", "isa", "dtype", "group", "head", "threads", "GB/s", "limit", "of limit", "x PyTorch"),
        _ops,
        note="The limit is a random gather of the same bytes, measured in the same run.",
    ),
}
"""In the order of the page."""

MARKS = {"decode": "ms_per_step", "ops": "kernel", "prefill": "same_top"}
"""What tells results of `coattn bench` apart: a key of their rows."""
