"""The small random model as a folder, for commands that take one; and JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.engine.small import small, tokenizer


def save_model(folder: Path) -> str:
    """512 positions, one token a byte, a chat template. What it answers has no meaning."""
    small().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def save_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def model_and_text(path: Path) -> Path:
    """A folder with the small random model, and `text.txt` in it."""
    save_model(path)
    (path / "text.txt").write_text("".join(f"{i * i % 97} and so on. " for i in range(60)))
    return path
