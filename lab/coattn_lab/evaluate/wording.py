"""A method and the parameters that decide what it does, in the same words in every table and figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

Data = Mapping[str, Any]


def describe(row: Data) -> str:
    """What a row ran: `hgca, window 4,096, beta 16, kept 7.0%`. The row's whole settings, or what it says was set."""
    return ", ".join([str(row.get("method", "")), *deciding(row)])


def deciding(row: Data) -> list[str]:
    """The parameters that decide, and whatever else was set."""
    given = dict(row.get("params") or {})
    whole = {**given, **(row.get("settings") or {})}
    block = whole.get("block") or 32
    found = []
    if whole.get("window_blocks") is not None:
        found.append(f"window {whole['window_blocks'] * block:,}")
    cut = row.get("kept_share") is not None or given.get("kept")
    for name, say in WORDS.items():
        # assumed lists take the place of what would decide how long they are
        if whole.get(name) is not None and not (cut and name in LENGTHS):
            found.append(say(whole[name]))
    usual = "mean" if "tau" in whole else "none"  # rows that choose by codes have a tail by themselves
    if whole.get("tail", usual) != usual:
        found.append(f"left out: {whole['tail']}")
    found += [word for word in (_kept(row, given), _memory(row)) if word]
    found += [_plain(name, given[name]) for name in _named(row, given) if name not in SAID and given[name] is not None]
    return [word for word in found if word]


def _named(row: Data, given: Data) -> list[str]:
    """Parameters that somebody set: benchmarks record these alone, a sweep's row is named after them."""
    if "ms_per_step" in row:
        return list(given)
    named = {part.partition("=")[0] for part in str(row.get("row", "")).split(",")[1:]}
    return [name for name in given if name in named]


def share(value: float) -> str:
    """A share for people: 0.0398 is 4.0%, 0.25 is 25%."""
    percent = 100 * value
    return f"{percent:.0f}%" if abs(percent - round(percent)) < 1e-9 else f"{percent:.1f}%"


def host_dtype(row: Data) -> str:
    """The numbers in which KV lies in DRAM; empty where none does."""
    if not row.get("host_kv_bytes"):
        return ""
    whole = {**(row.get("params") or {}), **(row.get("settings") or {})}
    form = whole.get("host_dtype")
    return str((form if form != "model" else None) or row.get("dtype") or "the model's")


def _kept(row: Data, given: Data) -> str:
    kept = given.get("kept")
    if isinstance(kept, list) and kept:
        return f"kept {' / '.join(share(each) for each in kept)}"
    return "" if row.get("kept_share") is None else f"kept {share(row['kept_share'])}"


def _memory(row: Data) -> str:
    if row.get("gpu_share"):
        return f"GPU {share(row['gpu_share'])} of the KV"
    memory = row.get("gpu_memory") or row.get("gpu_kv")
    return f"GPU {memory}" if memory else ""


def _plain(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, float):
        return f"{words} {value:.3g}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


def _groups(value: int) -> str:
    return f"{value} groups" if value else "exact keys"


LENGTHS = ("beta", "tau", "cap")
WORDS: dict[str, Callable[[Any], str]] = {
    "budget": lambda v: f"budget {v:,}",
    "recent": lambda v: f"recent {v:,}",
    "beta": lambda v: f"beta {v:g}",
    "tau": lambda v: f"tau {v:g}",
    "cap": lambda v: f"at most {v:,} entries",
    "groups": _groups,
    "codebook": lambda v: f"codebook {PurePath(v).stem}",
    "centroids": lambda v: f"{v:,} centroids",
    "code_bits": lambda v: "" if v == 16 else f"codes of {v} bits",
    "host_dtype": lambda v: "" if v == "model" else f"DRAM {v}",
}
"""Parameters that decide what is attended and where it lies."""
SAID = {*WORDS, "tail", "window_blocks", "block", "kept", "capacity"}
"""What is said above, and room that is set aside."""
