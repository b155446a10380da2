"""What a table says, in sentences: which rows are told apart from `full` by the prompts that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coattn_lab.evaluate.tasks.plain import NAME as PLAIN
from coattn_lab.evaluate.tasks.table import FULL, READ_AS
from coattn_lab.evaluate.wording import share

Line = Mapping[str, Any]
MODES = ("fed", "read")
DROPS = ("h2o", "tova", "snapkv", "duo", "streaming")
"""Rows whose answers to needles are told: what is dropped, or kept, before the question comes."""


def findings(found: Sequence[Line]) -> str:
    """A list in Markdown, for each model and length; a row is told apart where 95% of the differences leave out 0."""
    parts = []
    for model, length in dict.fromkeys((line["model"], line["length"]) for line in found):
        here = [line for line in found if (line["model"], line["length"]) == (model, length)]
        said = [*_plain(here), *(each for mode in MODES for each in _mode(here, mode)), *_needles(here)]
        if said:
            parts.append(f"{model}, {length:,} tokens:\n\n" + "".join(f"- {each}\n" for each in said))
    return "\n".join(parts)


def _plain(here: Sequence[Line]) -> list[str]:
    for line in here:
        each = line.get("ruler")
        if line["row"] == PLAIN and each and each["difference"] is not None:
            return [
                f"Plain Transformers has {each['difference']:+.1f} points of RULER{_spread(each)} beside `{FULL}`, "
                f"on the {each['paired']} prompts that both read."
            ]
    return []


def _mode(here: Sequence[Line], mode: str) -> list[str]:
    said = []
    own = [line for line in here if line["mode"] == mode and line["row"] not in (FULL, PLAIN) and "ruler" in line]
    known = [line for line in own if line["ruler"]["difference"] is not None and line["ruler"]["difference_95"]]
    for budget in sorted({line["budget"] for line in known if line["budget"] is not None}) or [None]:
        rows = sorted(
            (line for line in known if line["budget"] in (budget, None)), key=lambda line: -line["ruler"]["difference"]
        )
        same = [line for line in rows if line["ruler"]["difference_95"][1] >= 0 >= line["ruler"]["difference_95"][0]]
        worse = [line for line in rows if line["ruler"]["difference_95"][1] < 0]
        at = "" if budget is None else f", rows sized to {share(budget)}"
        head = f"{READ_AS[mode].capitalize()}{at}: RULER beside `{FULL}`"
        parts = [
            f"{name} {', '.join(map(_gap, lines))}"
            for name, lines in (("not told apart:", same), ("lower:", worse))
            if lines
        ]
        if parts:
            said.append(f"{head}, {'; '.join(parts)}.")
    return said


def _needles(here: Sequence[Line]) -> list[str]:
    by: dict[str, dict[str, float]] = {}
    budgets = [line["budget"] for line in here if line["budget"] is not None]
    for line in here:
        method = line["row"].split(",")[0]
        if method in DROPS and "needle" in line and line["budget"] in (None, *(budgets[:1])):
            by.setdefault(method, {}).setdefault(line["mode"], line["needle"]["score"])
    both = {method: scores for method, scores in by.items() if set(scores) >= set(MODES)}
    if not both:
        return []
    told = ", ".join(f"`{method}` {each['fed']:.0f}% and {each['read']:.0f}%" for method, each in both.items())
    return [f"Needles found, question fed and read: {told}."]


def _gap(line: Line) -> str:
    each = line["ruler"]
    return f"`{line['row'].split(',')[0]}` {each['difference']:+.1f}{_spread(each)}"


def _spread(each: Mapping[str, Any]) -> str:
    low_high = each["difference_95"]
    return "" if low_high is None else f" ({low_high[0]:+.1f} to {low_high[1]:+.1f})"
