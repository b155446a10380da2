"""How close lossy rows came to full attention in the kept results; `scripts/make_reference.py` writes the numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")


@cache
def _rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def measured(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """model, tokens, kl, perplexity_ratio and source of a row; None where it was not measured with these parameters."""
    for row in _rows():
        known = {name: value for name, value in row["params"].items() if name in params}
        if row["method"] == method and all(params[name] == value for name, value in known.items()):
            return {name: row[name] for name in ("model", "tokens", "kl", "perplexity_ratio", "source")}
    return None


def from_results(path: Path) -> str:
    """What `measured.json` has to say after a sweep's results."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        {
            "method": row["method"],
            "params": row["params"],
            "model": data["model"],
            "tokens": data["length"],
            "kl": row["kl"],
            "perplexity_ratio": row["ratio"],
            "source": f"results/{path.name}",
        }
        for row in data["rows"]
        if not row["exact"]
    ]
    return json.dumps(rows, indent=1) + "\n"
