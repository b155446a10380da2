"""Results as rows of Markdown tables: one kind of result, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coattn.evaluate.request_rows import BESIDE, REQUESTS, beside_rows, request_rows
from coattn.evaluate.session_rows import session_rows
from coattn.evaluate.wording import deciding, host_dtype, share
from coattn.units import format_bytes

Result = Mapping[str, Any]
Row = Sequence[str]


@dataclass(frozen=True)
class Kind:
    """title: of the section. head: of the table. rows: one result -> its rows. group: what rows must have in common to
    stand in one table, row by row; without, all rows of a kind stand in one."""

    title: str
    head: Sequence[str]
    rows: Callable[[Result], Iterable[Row]]
    group: Callable[[Result], Iterable[str]] | None = None
    note: str = ""


def kind_of(result: Result) -> str | None:
    """Which kind of result this is; None for anything else."""
    name = result.get("evaluation")
    if name in KINDS:
        return str(name)
    rows = result.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    return next((kind for kind, keys in MARKS.items() if keys <= set(first)), None)


def markdown(head: Sequence[str], rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def method(result: Result) -> str:
    """The method and the parameters that decide: `streaming`, GPU 12.5% of the KV."""
    return ", ".join([f"`{result.get('method', '')}`", *deciding(result)])


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
    by = ", ".join(f"{each['length']:,}: {each['found']}/{each['total']}{_read(each)}" for each in result["by_length"])
    what = "pass key" if result.get("keys", 1) == 1 else f"{result['keys']} keys"
    what = "needles of a file" if result.get("needles") else what
    yield model(result), method(result), what, f"{result['found']} of {result['total']}", by


def _read(each: Result) -> str:
    return "" if each.get("read_share") is None else f" ({share(round(each['read_share'], 3))})"


def _fidelity(result: Result) -> Iterable[Row]:
    yield (
        model(result), method(result), number(result.get("length"), ","), number(result.get("kl"), ".3g"),
        number(result.get("top1"), ".1%"), number(result.get("top5"), ".1%"), number(result.get("cosine"), ".4f"),
        number(result.get("mass"), ".1%"), number(result.get("share_attended"), ".1%"),
        number(result.get("cpu_ratio"), ".0%"),
    )  # fmt: skip


def _perplexity(result: Result) -> Iterable[Row]:
    decode = result.get("decode") or {}
    yield (
        model(result), method(result), number(result.get("length"), ","), number(result.get("perplexity"), ".3f"),
        number(result.get("perplexity_full"), ".3f"), number(result.get("ratio"), ".4f"),
        number(decode.get("ratio"), ".4f") + spread(decode.get("ratio_95")), number(result.get("tokens"), ","),
    )  # fmt: skip


def _sweep(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        kept = [row.get(f"kept_{name}") for name in ("lowest", "median", "highest")]
        kept = kept if any(kept) else [row.get("kept_mean")]
        yield (
            method(row), number(row["ratio"], ".4f") + spread(row.get("ratio_95")), number(row["kl"], ".2g"),
            number(row["top1"], ".1%"), number(row["attended_gpu"] + row["attended_host"], ",.0f"),
            number(row["attended_host"], ",.0f"), " / ".join(number(x, ".1%") for x in kept if x is not None),
        )  # fmt: skip


def _subject(result: Result) -> Iterable[str]:
    for _ in result["rows"]:
        yield f"{model(result)}, {windows(result)}"


def windows(result: Result) -> str:
    """The text of a result of quality: `4 windows of 8,192 tokens of a.txt, the last 128 decoded`."""
    name, length = (result.get("text") or {}).get("name", ""), result.get("length")
    starts, prefill = result.get("starts") or [0], result.get("prefill")
    count = f"{len(starts)} windows of" if len(starts) > 1 else f"from token {starts[0]:,}:" if starts[0] else ""
    decoded = f", the last {length - prefill:,} decoded" if length and prefill else ""
    return f"{count} {number(length, ',')} tokens of {name}{decoded}".strip()


def _hcattention(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        against = row["against_full"]
        yield (
            row["row"], method(row), number(against["ratio"], ".4f") + spread(against.get("ratio_95")),
            number(row["kl"], ".2g"), number(row["top1"], ".1%"), number(row["share_attended"], ".1%"),
            size(row["gpu_kv_bytes"]), size(row["host_kv_bytes"]),
        )  # fmt: skip


def spread(interval: Sequence[float] | None) -> str:
    """A 95% interval in brackets, where there is one."""
    return f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else ""


def _scores(result: Result) -> Iterable[Row]:
    for task in result["tasks"]:
        yield model(result), method(result), task["task"], str(task["items"]), number(task["score"], ".2f")
    yield from _mean(result)


def _tasks(result: Result) -> Iterable[Row]:
    for line in result["scores"]:
        interval = line.get("score_95")
        spread_ = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
        yield (
            model(result), f"`{result['named']}`", line["benchmark"], line["mode"], number(line["length"], ","),
            str(line["items"]), number(line["score"], ".1f") + spread_, number(line["tokens_to_answer"], ".1f"),
        )  # fmt: skip


def _mean(result: Result) -> Iterable[Row]:
    count = sum(task["items"] for task in result["tasks"])
    yield model(result), method(result), "mean", str(count), number(result.get("mean"), ".2f")


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
    "needle": Kind(
        "Needle",
        ("model", "method", "hidden", "found", "found by length (KV bytes that a step reads, of all)"),
        _needle,
        note="Rows differ in what they may attend to: compare rows that read the same share at the same length.",
    ),
    "fidelity": Kind(
        "Fidelity to full attention",
        ("model", "method", "tokens", "KL", "top-1", "top-5", "cosine", "mass", "attended", "CPU"),
        _fidelity,
    ),
    "perplexity": Kind(
        "Perplexity",
        ("model", "method", "tokens", "perplexity", "full", "ratio", "ratio of decode steps", "scored"),
        _perplexity,
    ),
    "sweep": Kind(
        "Perplexity of decode steps, many rows",
        (
            "row",
            "ratio to full",
            "KL",
            "top-1",
            "attended",
            "of it in DRAM",
            "kept of DRAM: lowest, median, highest head, or the mean",
        ),
        _sweep,
        group=_subject,
        note="Entries attended are those per KV head in the last step.",
    ),
    "hcattention": Kind(
        "Tables of HCAttention",
        ("row", "method", "ratio to full", "KL", "top-1", "attended", "GPU KV", "DRAM KV"),
        _hcattention,
        group=_subject,
    ),
    "attention": Kind(
        "Attention",
        ("model", "tokens", "entries a head needs", "blocks that change per step", "query cosine one layer ahead"),
        _attention,
        note="The cosines are with norm and RoPE, without RoPE, without norm, without both.",
    ),
    "longbench": Kind("LongBench", SCORES, _scores),
    "ruler": Kind("RULER", SCORES, _scores),
    "tasks": Kind(
        "Tasks",
        ("model", "row", "benchmark", "question", "tokens", "prompts", "score", "tokens to the answer"),
        _tasks,
        note="The question is read with the prompt, or fed under the method. `coattn eval table` compares rows.",
    ),
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
        "many questions about one; see `coattn bench sessions --help`.",
    ),
    "ops": Kind(
        "CPU kernels",
        ("kernel", "isa", "dtype", "group", "head", "threads", "GB/s", "limit", "of limit", "x PyTorch"),
        _ops,
        note="The limit is a random gather of the same bytes, measured in the same run.",
    ),
}
"""In the order of the page."""

MARKS = {
    "decode": {"ms_per_step", "shapes", "batch"},
    "ops": {"kernel", "isa"},
    "prefill": {"same_top"},
    "sessions": {"check", "method"},
    "requests": {"total_s", "tokens_per_s"},
    "beside": {"between_ratio", "prompt_ratio"},
    "hcattention": {"against_full"},
}
"""What tells results of `coattn bench` apart: keys of their rows."""
EVERY_ROW = ("random weights", "random keys and values")
"""What the caption says."""
