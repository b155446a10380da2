"""Folders of results as one table: a row is a method as it was set, a column what it was asked, beside what it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn.units import format_bytes
from coattn_lab.evaluate.results import fault, read_result
from coattn_lab.evaluate.tasks.budget import CLOSE
from coattn_lab.evaluate.tasks.summary import difference, groups, interval, mean_of_tasks, scores, tokens_to_answer

FULL = "full"
BENCHMARKS = ("ruler", "qasper", "needle", "longbench", "minilongbench", "text")
READ_AS = {"read": "question read with the prompt", "fed": "question fed under the method"}


@dataclass
class Merged:
    """One row of one model, from all files that have it."""

    model: str
    dtype: str
    sha256: str | None
    name: str
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    kl: dict[str, float] = field(default_factory=dict)
    """By the text and length that a sweep measured it on."""
    asked: str = ""
    """Its name before it was sized."""
    budget: float | None = None
    why: str | None = None
    """Why it misses its budget, where it has one and does."""
    faults: list[str] = field(default_factory=list)


def read_results(folders: Sequence[Path]) -> list[Merged]:
    """Every result of tasks below the folders, merged by model and row; `full` first, then as they are found.

    Files of other seeds or lengths add prompts to a row. The same prompt twice is refused: it would count twice.
    KL comes from the sweeps that lie there, where model and row are the same.
    """
    found: dict[tuple[str, str, str], Merged] = {}
    sweeps = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}.", "Give folders that `coattn-lab eval table --out` made.")
        for path in sorted(folder.rglob("*.json")):
            try:
                data = read_result(path)
            except InputError:
                continue
            if data.get("evaluation") == "sweep":
                sweeps.append(data)
            if data.get("evaluation") != "tasks":
                continue
            key = data["model"], data["dtype"], data["named"]
            row = found.setdefault(key, Merged(key[0], key[1], data.get("model_sha256"), key[2]))
            if row.sha256 != data.get("model_sha256"):
                raise InputError(f"{path} is of another model of the name {row.model}.", "Leave one of them out.")
            _add(row, data, path)
    if not found:
        named = ", ".join(map(str, folders))
        raise InputError(f"There are no results of tasks in {named}.", "Make some with `coattn-lab eval table --rows`.")
    for data in sweeps:
        where = f"{data['length']:,} tokens of {data['text']['name']}"
        for each in data["rows"]:
            merged = found.get((data["model"], data["dtype"], each["row"]))
            if merged is not None:
                merged.kl[where] = each["kl"]
    return sorted(found.values(), key=lambda row: (row.model, row.dtype, row.name != FULL))


def _add(row: Merged, data: Mapping[str, Any], path: Path) -> None:
    twice = next((item["item"] for item in data["items"] if item["item"] in row.items), None)
    if twice is not None:
        raise InputError(
            f"{path.name} answers {twice} under {row.name}, and so does {', '.join(row.files)}.",
            "Leave one of the files out: a prompt counts once.",
        )
    row.items |= {item["item"]: item for item in data["items"]}
    row.runs |= {length: run for length, run in (data.get("runs") or {}).items() if length not in row.runs}
    row.files.append(path.name)
    row.asked = data.get("asked") or data["named"]
    row.budget, row.why = data.get("budget"), data.get("budget_why")
    why = fault(data)
    if why is not None:
        row.faults.append(f"{path.name}: {why}")


def lines(rows: Sequence[Merged]) -> list[dict[str, Any]]:
    """One line for each model, mode, length and row: scores with intervals, the difference to `full`, what it took."""
    found = []
    for row in rows:
        full = next((each for each in rows if each.name == FULL and _same(each, row)), None)
        by = groups(row.items.values())
        for mode, length in sorted({(mode, length) for _, mode, length in by}):
            run = row.runs.get(str(length)) or {}
            line = {
                "model": row.model,
                "dtype": row.dtype,
                "model_sha256": row.sha256,
                "row": row.name,
                "asked": row.asked or row.name,
                "budget": row.budget,
                "budget_missed": missed(row, run.get("gpu_share")),
                "mode": mode,
                "length": length,
                **{key: run.get(key) for key in RUN},
                **_read(run),
                **_step(run),
                "answer_kl": run.get("answer_kl"),
                "kl": row.kl,
                "files": row.files,
            }
            for benchmark in BENCHMARKS:
                items = by.get((benchmark, mode, length))
                if items:
                    line[benchmark] = _scores(items, None if full is None or full is row else full.items.values())
            found.append(line)
    return found


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def missed(row: Merged, taken: float | None) -> str | None:
    """Why a row's KV in GPU memory is more than a tenth off its budget, as measured; None where it is not."""
    if row.budget is None or taken is None or abs(taken / row.budget - 1) <= CLOSE:
        return None
    return row.why or "the run took another share than was planned"


RUN = ("gpu_kv_bytes", "host_kv_bytes", "gpu_share", "captured")


def _read(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a step reads: of those whose predictions were compared; else of the engine's."""
    looked = (run.get("answer_kl") or {}).get("read") or {}
    return {"read_share": looked.get("share", run.get("read_share")), "dram_tokens": looked.get("dram_tokens")}


def _step(run: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step: of those whose predictions were compared; else of the engine's while it answered."""
    timed = (run.get("answer_kl") or {}).get("timed")
    if timed is None:
        return {"ms_per_step": run.get("ms_per_step"), "p99_ms": None, "batch": run.get("batch"), "timed_steps": None}
    return {
        "ms_per_step": timed["ms"],
        "p99_ms": timed["p99_ms"],
        "batch": timed["batch"],
        "timed_steps": timed["steps"],
    }


def overall(rows: Sequence[Merged]) -> list[dict[str, Any]]:
    """Of rows that answered a benchmark at several lengths, sized for each: its score over all of them."""
    by: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row.model, row.dtype, row.sha256, row.asked or row.name, row.budget), {}).update(row.items)
    full = {key[:3]: items for key, items in by.items() if key[3] == FULL}
    found = []
    for (*model, asked, budget), items in by.items():
        answered = groups(items.values())
        for benchmark, mode in sorted({(benchmark, mode) for benchmark, mode, _ in answered}):
            some = [each for (b, m, _), own in answered.items() if (b, m) == (benchmark, mode) for each in own]
            lengths = sorted({each["length"] for each in some})
            if len(lengths) > 1:
                other = None if asked == FULL else full.get(tuple(model))
                scored = _scores(some, None if other is None else other.values())
                named = {"model": model[0], "dtype": model[1], "row": asked, "budget": budget}
                found.append({**named, "benchmark": benchmark, "mode": mode, "lengths": lengths, **scored})
    return sorted(found, key=lambda each: (each["model"], each["benchmark"], each["mode"], each["row"] != FULL))


def _same(one: Merged, other: Merged) -> bool:
    return (one.model, one.dtype, one.sha256) == (other.model, other.dtype, other.sha256)


def _scores(items: Sequence[Mapping[str, Any]], full: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    by = scores(items)
    against = None if full is None else difference(items, full)
    return {
        "score": mean_of_tasks(by),
        "score_95": interval(by),
        "items": len(items),
        "tokens_to_answer": tokens_to_answer(items),
        "difference": None if against is None else against[0],
        "difference_95": None if against is None else against[1],
        "paired": None if against is None else against[2],
        "tasks": {task: sum(each) / len(each) for task, each in by.items()},
    }


def page(found: Sequence[Mapping[str, Any]], rows: Sequence[Merged]) -> str:
    """The tables as Markdown, one for each model, mode and length, the best first but for `full`."""
    parts = ["# Tasks\n"]
    keys = list(dict.fromkeys((each["model"], each["dtype"], each["mode"], each["length"]) for each in found))
    for model, dtype, mode, length in keys:
        here = [
            each
            for each in found
            if (each["model"], each["dtype"], each["mode"], each["length"]) == (model, dtype, mode, length)
        ]
        there = [name for name in BENCHMARKS if any(name in each for each in here)]
        parts.append(f"## {model} ({dtype}), {length:,} tokens, {READ_AS.get(mode, mode)}\n")
        parts.append(markdown(_head(there), [_row(each, there) for each in sorted(here, key=_rank)]))
    together = overall(rows)
    if together:
        parts.append("## Over all lengths\n")
        head = ("model", "benchmark", "question", "row", "KV on the GPU", "prompts", "score", "minus `full`")
        parts.append(markdown(head, map(_together, together)))
    parts.append(NOTE)
    reasons = {each["row"]: each["budget_missed"] for each in found if each["budget_missed"]}
    if reasons:
        parts.append("Not at their budget:\n\n" + "".join(f"- `{row}`: {why}.\n" for row, why in reasons.items()))
    faults = [why for row in rows for why in row.faults]
    if faults:
        parts.append("Not to be published:\n\n" + "".join(f"- {why}\n" for why in faults))
    return "\n".join(parts)


NOTE = """Scores are in percent, the mean over tasks that count the same, with 95% of what comes out when prompts are
drawn anew; behind them the difference to `full` on the same prompts. GPU KV and DRAM KV are bytes of a sequence of that
length, and their share of its KV, the budget behind it where a row was sized to meet one; read is the KV that a step
reads, of all, behind it the tokens of a sequence that it reads in DRAM. `text` is how often a row would go on as full
attention does, and its KL is along the text itself. Tokens to the answer are counted where the whole answer was
found. KL is that of a row's predictions from full attention's, in nats, along the first tokens of full attention's
answers to the first prompts of each task, the question fed under the row; its interval is over prompts. Milliseconds
are the median of the same steps, and behind them their 99th percentile and how many sequences took part. Nothing is
simulated: every choice is the row's own.
"""


def _together(line: Mapping[str, Any]) -> list[str]:
    gap = line["difference"]
    return [
        line["model"],
        line["benchmark"],
        line["mode"],
        f"`{_named(line['row'])}`",
        "" if line["budget"] is None else f"{100 * line['budget']:g}%",
        str(line["items"]),
        f"{line['score']:.1f}{_spread(line['score_95'])}",
        "" if gap is None else f"{gap:+.1f}{_spread(line['difference_95'], '+')}",
    ]


def _rank(line: Mapping[str, Any]) -> tuple[bool, float]:
    known = [line[name]["score"] for name in BENCHMARKS if name in line]
    return line["row"] != FULL, -sum(known) / len(known) if known else 0.0


def _head(there: Sequence[str]) -> list[str]:
    asked = [column for name in there for column in (name, "minus `full`")]
    return ["row", "GPU KV", "DRAM KV", "read", "ms a step (p99; batch)", *asked, "tokens to the answer", "KL"]


def _row(line: Mapping[str, Any], there: Sequence[str]) -> list[str]:
    cells = [
        f"`{_named(line['row'])}`",
        _memory(line),
        "" if line["host_kv_bytes"] is None else format_bytes(line["host_kv_bytes"]),
        "" if line["read_share"] is None else f"{line['read_share']:.1%}{_in_dram(line)}",
        _milliseconds(line),
    ]
    for name in there:
        each = line.get(name)
        cells.append("" if each is None else f"{each['score']:.1f}{_spread(each['score_95'])}")
        gap = None if each is None else each["difference"]
        cells.append("" if gap is None or each is None else f"{gap:+.1f}{_spread(each['difference_95'], '+')}")
    known = [line[name]["tokens_to_answer"] for name in there if name in line]
    cells.append(", ".join("-" if each is None else f"{each:.1f}" for each in known))
    own = line["answer_kl"]
    kls = [] if own is None or line["row"] == FULL else [f"{own['kl']:.2g}{_around(own['kl_95'])}"]
    cells.append(", ".join([*kls, *(f"{value:.2g} ({where})" for where, value in line["kl"].items())]))
    return cells


def _named(row: str) -> str:
    """Files by their names alone."""
    words = [word.split("=", 1) for word in row.split(",")]
    return ",".join("=".join([*word[:-1], Path(word[-1]).name if "/" in word[-1][:1] else word[-1]]) for word in words)


def _memory(line: Mapping[str, Any]) -> str:
    if line["gpu_kv_bytes"] is None:
        return ""
    budget = "" if line["budget"] is None else f" of {100 * line['budget']:g}%"
    return f"{format_bytes(line['gpu_kv_bytes'])} ({line['gpu_share']:.1%}{budget})"


def _in_dram(line: Mapping[str, Any]) -> str:
    return "" if line.get("dram_tokens") is None else f" ({line['dram_tokens']:,.0f} in DRAM)"


def _milliseconds(line: Mapping[str, Any]) -> str:
    if line["ms_per_step"] is None:
        return ""
    p99 = "" if line["p99_ms"] is None else f"{line['p99_ms']:.2f}; "
    return f"{line['ms_per_step']:.2f} ({p99}{line['batch']})"


def _around(interval_95: Sequence[float] | None) -> str:
    return "" if interval_95 is None else f" ({interval_95[0]:.2g} to {interval_95[1]:.2g})"


def _spread(interval_95: Sequence[float] | None, sign: str = "") -> str:
    return "" if interval_95 is None else f" ({interval_95[0]:{sign}.1f} to {interval_95[1]:{sign}.1f})"
