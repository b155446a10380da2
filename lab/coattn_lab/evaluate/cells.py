"""What the cells of tables of results have in common: the method, the model, numbers, sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coattn.units import format_bytes
from coattn_lab.evaluate.wording import deciding

Result = Mapping[str, Any]
Row = Sequence[str]


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


def spread(interval: Sequence[float] | None) -> str:
    """A 95% interval in brackets, where there is one."""
    return f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else ""


def windows(result: Result) -> str:
    """The text of a result of quality: `4 windows of 8,192 tokens of a.txt, the last 128 decoded`."""
    name, length = (result.get("text") or {}).get("name", ""), result.get("length")
    starts, prefill = result.get("starts") or [0], result.get("prefill")
    count = f"{len(starts)} windows of" if len(starts) > 1 else f"from token {starts[0]:,}:" if starts[0] else ""
    decoded = f", the last {length - prefill:,} decoded" if length and prefill else ""
    return f"{count} {number(length, ',')} tokens of {name}{decoded}".strip()
