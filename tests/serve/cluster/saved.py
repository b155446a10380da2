"""The very small model as a folder, for replicas in other processes."""

from __future__ import annotations

from pathlib import Path

from tests.engine.small import small, tokenizer


def save(folder: Path) -> Path:
    small().cpu().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
