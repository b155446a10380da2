"""Rows of `coattn-lab bench requests` and `bench beside`, as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coattn.units import format_bytes
from coattn_lab.evaluate.wording import deciding

REQUESTS = (
    "shapes", "cap", "method", "requests", "new tokens", "seconds", "tokens/s", "first token, median", "between, p99",
)  # fmt: skip
BESIDE = ("shapes", "method", "decoding", "between, alone", "between, p99 beside", "x", "prompt", "alone", "x")


def request_rows(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """A burst or a stream of requests under each method."""
    cap = result.get("gpu_kv")
    for row in result["rows"]:
        named = [f"`{row['method']}`", *deciding(row)]
        if row.get("chunk"):
            named.append(f"chunk={row['chunk']}")
        if row.get("driven"):
            named.append("driven")
        count, made = row.get("requests"), row.get("tokens")
        yield (
            str(result.get("shapes", "")), "none" if cap is None else format_bytes(cap), ", ".join(named),
            "" if count is None else str(count), "" if made is None else f"{made:,}",
            f"{row['total_s']:.2f}" if "total_s" in row else "refused",
            _number(row.get("tokens_per_s"), ".0f"), _number(row.get("ttft_median_s"), ".2f", " s"),
            _number(row.get("between_p99_s"), ".0f", " ms", 1e3),
        )  # fmt: skip


def beside_rows(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Sequences that decode while a prompt is read."""
    for row in result["rows"]:
        yield (
            str(result.get("shapes", "")), f"`{row['method']}`", f"{row['batch']} of {row['context']:,}",
            _number(row["between_median_s"], ".1f", " ms", 1e3), _number(row["beside_p99_s"], ".1f", " ms", 1e3),
            _number(row["between_ratio"], ".2f"), f"{row['tokens']:,}, {row['prompt_beside_s']:.2f} s",
            f"{row['prompt_alone_s']:.2f} s", f"{row['prompt_ratio']:.2f}",
        )  # fmt: skip


def _number(value: float | None, style: str, unit: str = "", by: float = 1.0) -> str:
    return "" if value is None else format(value * by, style) + unit
