"""Result files of earlier versions: the same numbers under the names that they have now."""

from __future__ import annotations

from typing import Any

ROWS = {"attended_near": "attended_gpu", "attended_far": "attended_host", "far_gbps": "host_gbps"}
PARAMETERS = {"dram": "host_dtype", "values": "host_dtype", "context": "capacity", "resident": "pool_blocks"}


def in_names_of_today(result: dict[str, Any]) -> dict[str, Any]:
    """A result as its file has it -> the same, as if it had been written now; what has no other name stays."""
    rows = result.get("rows")
    return _row(result) | (
        {"rows": [_row(row) if isinstance(row, dict) else row for row in rows]} if isinstance(rows, list) else {}
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    named = {ROWS.get(name, name): value for name, value in row.items()}
    for key in ("params", "settings"):
        if isinstance(named.get(key), dict):
            named[key] = {PARAMETERS.get(name, name): value for name, value in named[key].items()}
    return named
