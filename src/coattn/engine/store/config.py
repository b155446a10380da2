"""The disk tier that was asked for, and by what its files are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.engine.store.files import FileCache
from coattn.engine.store.keys import FORMAT, digest
from coattn.errors import ConfigError
from coattn.hf.fingerprint import config_fingerprint, read_by
from coattn.types import LayerShape
from coattn.units import as_folder, parse_bytes

LIMIT_BYTES = 16 << 30
"""Most bytes of the files, unless said."""


@dataclass(frozen=True)
class DiskConfig:
    """A folder, or None, and the most bytes of its files."""

    folder: Path | None
    limit: int

    @staticmethod
    def of(disk: str | Path | None, memory: int | float | str | None) -> DiskConfig:
        """Raises ConfigError for what does not go together."""
        limit = parse_bytes(memory, "disk_memory")
        if disk is None and memory is not None:
            raise ConfigError("disk_memory is given, but no folder for it.", "Give disk as well, or leave it out.")
        return DiskConfig(as_folder("disk", disk), LIMIT_BYTES if limit is None else limit)

    def key(self, model: Any, layers: Sequence[LayerShape]) -> bytes:
        """The fingerprint of a model, by which what is stored of it is known."""
        # files outlast the process, and may meet a model of the same configuration with other weights
        known_by = config_fingerprint(model) if self.folder is None else read_by(model)
        return digest(FORMAT, known_by, repr([shape.mark for shape in layers]))

    def open(self, key: bytes) -> FileCache | None:
        """The caller closes it."""
        return None if self.folder is None else FileCache(self.folder, self.limit, {"model": key.hex()})
