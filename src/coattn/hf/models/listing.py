"""What `coattn models` shows: every model of the catalog, and whether it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coattn.hf.models import cache, manifest
from coattn.hf.models.catalog import CATALOG, Embedded

State = Literal["ready", "absent", "damaged"]


@dataclass(frozen=True)
class ModelInfo:
    """One line of the list. `bytes` is the size on disk when ready, else what a download would fetch."""

    name: str
    state: State
    bytes: int
    path: Path
    reason: str | None
    """Why a damaged model is not ready; None otherwise. `get` makes a damaged one again."""
    facts: Embedded


def list_models() -> list[ModelInfo]:
    """Every model of the catalog by name. Looks at file sizes only, writes nothing, needs no network."""
    return [_info(CATALOG[name]) for name in sorted(CATALOG)]


def _info(entry: Embedded) -> ModelInfo:
    folder = cache.model_dir(entry.name)
    reason = manifest.fault(folder, entry)
    record = manifest.read(folder)
    if reason is None and record is not None:
        return ModelInfo(entry.name, "ready", record.bytes, folder, None, entry)
    if folder.exists():
        return ModelInfo(entry.name, "damaged", entry.wheel_bytes, folder, reason, entry)
    return ModelInfo(entry.name, "absent", entry.wheel_bytes, folder, None, entry)
