#!/usr/bin/env python3
"""Prints what `scripts/auto_gpu.sh` has found: `auto_table.py FOLDER [--markdown]`.

A line for each row: KL and perplexity's ratio with their intervals, a column for each text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = ("essays", "source", "topics")


def label(row: dict[str, Any]) -> str:
    """The row as people call it."""
    if not row.get("budget"):
        return str(row["row"]).replace(",", ", ")
    return f"{row['method']}, {row['budget']:.0%}"


def cell(row: dict[str, Any] | None) -> str:
    """KL with its interval, and what perplexity grew by."""
    if row is None:
        return ""
    low, high = row["kl_95"]
    return f"{row['kl']:.2g} ({low:.2g} to {high:.2g}), {row['ratio'] - 1:+.2%}"


def lines(folder: Path, name: str) -> list[list[str]]:
    """Of one model and length: `[row, KV on the GPU, attended, a cell for each text]`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for text in TEXTS:
        path = folder / f"{name}_{text}.json"
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            found.setdefault(label(row), {})[text] = row
    made = []
    for said, by_text in found.items():
        first = next(iter(by_text.values()))
        read = sum(row["attended_gpu"] + row["attended_host"] for row in by_text.values()) / len(by_text)
        cells = [cell(by_text.get(text)) for text in TEXTS]
        made.append([said, f"{first['gpu_share']:.1%}", f"{read:,.0f}", *cells])
    return made


def main() -> None:
    """Prints a table for each model and length, then the audited qualities."""
    folder, markdown = Path(sys.argv[1]), "--markdown" in sys.argv
    for name in ("kl16", "fine16", "kl30", "kl8"):
        rows = lines(folder, name)
        if not rows:
            continue
        head = ["row", "KV on the GPU", "tokens attended", *(f"{text}: KL, perplexity" for text in TEXTS)]
        print(f"\n{name}\n")
        for number, row in enumerate([head, *rows]):
            print(("| " + " | ".join(row) + " |") if markdown else "  ".join(row))
            if markdown and not number:
                print("|" + "---|" * len(head))
    path = folder / "audit16_essays.json"
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        print(json.dumps({key: round(v, 5) if isinstance(v, float) else v for key, v in row.items()}))


if __name__ == "__main__":
    main()
