"""Results of quality as rows of tables: `coattn eval`."""

from __future__ import annotations

from collections.abc import Iterable

from coattn_lab.evaluate.cells import Result, Row, method, model, number, size, spread, windows
from coattn_lab.evaluate.kind import Kind
from coattn_lab.evaluate.wording import share


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


def _hcattention(result: Result) -> Iterable[Row]:
    for row in result["rows"]:
        against = row["against_full"]
        yield (
            row["row"], method(row), number(against["ratio"], ".4f") + spread(against.get("ratio_95")),
            number(row["kl"], ".2g"), number(row["top1"], ".1%"), number(row["share_attended"], ".1%"),
            size(row["gpu_kv_bytes"]), size(row["host_kv_bytes"]),
        )  # fmt: skip


def _scores(result: Result) -> Iterable[Row]:
    for task in result["tasks"]:
        yield model(result), method(result), task["task"], str(task["items"]), number(task["score"], ".2f")
    yield from _mean(result)


def _mean(result: Result) -> Iterable[Row]:
    count = sum(task["items"] for task in result["tasks"])
    yield model(result), method(result), "mean", str(count), number(result.get("mean"), ".2f")


def _tasks(result: Result) -> Iterable[Row]:
    for line in result["scores"]:
        interval = line.get("score_95")
        spread_ = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
        yield (
            model(result), f"`{result['named']}`", line["benchmark"], line["mode"], number(line["length"], ","),
            str(line["items"]), number(line["score"], ".1f") + spread_, number(line["tokens_to_answer"], ".1f"),
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

QUALITY = {
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
        note="The question is read with the prompt, or fed under the method. `coattn-lab eval table` compares rows.",
    ),
}
"""In the order of the page."""
