"""Results of `coattn-lab bench sessions` in words: what each check has found."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coattn.units import format_bytes

NO_GAPS = "no gaps seen"
"""Where nobody got two tokens while something went on, so that nothing can be compared."""


def session_rows(result: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Shapes, tokens of the text, cap, method, check, and what was measured."""
    cap = result.get("gpu_kv")
    for row in result["rows"]:
        params = "".join(f", {name}={value}" for name, value in row.get("params", {}).items())
        said = row["refused"] if "refused" in row else WORDS[row["check"]](row)
        yield (
            str(result["shapes"]), f"{result['tokens']:,}", "none" if cap is None else format_bytes(cap),
            f"`{row['method']}`{params}", row["check"], said,
        )  # fmt: skip


def _again(row: Mapping[str, Any]) -> str:
    asked, moved = len(row["second_s"]), row["moved"]
    far = f", {format_bytes(moved['fetched_bytes'] // asked)} of it out of DRAM" if "fetched_bytes" in moved else ""
    beside = f", {row['turn_ratio']:.2f} x `full`" if "turn_ratio" in row else ""
    return (
        f"first token {row['first_s']:.2f} s, again {statistics.median(row['second_s']) * 1e3:.0f} ms "
        f"({row['second_ratio']:.1%}); a turn {row['turn_median_s'] * 1e3:.0f} ms{beside}; "
        f"copied for a hit: {format_bytes(moved['copied_bytes'] // asked)}{far}"
    )


def _shared(row: Mapping[str, Any]) -> str:
    held, whole = (format_bytes(row[name]) for name in ("host_kv_peak", "separate_bytes_at_once"))
    return (
        f"{row['questions']} questions, {row['max_batch']} at a time, in {row['total_s']:.1f} s, "
        f"{row['tokens_per_s']:.1f} tokens/s, {held} of DRAM; one about a text of its own {row['separate_s']:.1f} s, "
        f"{row['separate_tokens_per_s']:.1f} tokens/s; all at once they would need {whole}"
    )


def _beside(row: Mapping[str, Any]) -> str:
    usual = row["between_median_s"]
    said = NO_GAPS if usual is None else f"{usual * 1e3:.1f} ms"
    return (
        f"steps of others {said}; while a turn is read {_times(row, 'reading')}, while entries are chosen again "
        f"{_times(row, 'choosing')}"
    )


def _times(row: Mapping[str, Any], name: str) -> str:
    ratio = row[f"{name}_ratio"]
    return NO_GAPS if ratio is None else f"{ratio:.2f} x in the mean, {row[f'{name}_max_s'] * 1e3:.1f} ms at most"


def _disk(row: Mapping[str, Any]) -> str:
    computed, back = (statistics.median(row[name]) for name in ("computed_s", "disk_s"))
    cached = ", ".join(f"{tokens:,}" for tokens in row["disk_cached_tokens"])
    return (
        f"computed {computed:.2f} s, from memory {row['memory_s']:.2f} s, after it had left memory {back:.2f} s, of it "
        f"from the disk: {cached} tokens"
    )


def _tenants(row: Mapping[str, Any]) -> str:
    first, other, own = (row[name] * 1e3 for name in ("first_s", "other_salt_s", "same_salt_s"))
    return (
        f"{row['pairs']} prompts: {first:.1f} ms, under another salt {other:.1f} ms (sooner: p "
        f"{row['other_sooner_p']:.2f}), under the same {own:.1f} ms (p {row['same_sooner_p']:.4f})"
    )


WORDS = {"again": _again, "shared": _shared, "beside": _beside, "disk": _disk, "tenants": _tenants}
