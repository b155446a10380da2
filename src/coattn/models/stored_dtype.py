"""The dtype that a converted model's config names, which is what plain Transformers loads it in."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from coattn.errors import ModelError
from coattn.models import cache, manifest
from coattn.models.hashing import sha256_of

DTYPE = "float32"
"""Fast on every machine; a CPU without instructions for bfloat16 multiplies that hundreds of times slower."""


def settle(folder: Path, name: str, *, locked: bool = False) -> None:
    """Makes the config of a model that an earlier version converted name DTYPE; else a look at one small file.

    Takes no network. A folder that cannot be written to stays as it is: it works, slowly on some machines.
    locked: whether the caller holds `cache.locked(name)`.
    """
    if _named(folder) in (None, DTYPE):
        return
    try:
        with nullcontext() if locked else cache.locked(name, timeout=60.0):
            made = manifest.read(folder)
            if made is None or _named(folder) in (None, DTYPE):
                return
            config = folder / "config.json"
            _replace(config, json.dumps({**json.loads(config.read_text(encoding="utf-8")), "dtype": DTYPE}, indent=2))
            files = {**made.files, config.name: (config.stat().st_size, sha256_of(config))}
            # Between the two a reader finds a wrong size, waits for the lock, and finds the right one.
            _replace(folder / manifest.FILE, json.dumps(asdict(replace(made, files=files)), indent=2))
    except (OSError, ModelError):
        return


def _named(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _replace(path: Path, text: str) -> None:
    mode, new = path.stat().st_mode, path.with_name(f".{path.name}.new")
    new.write_text(text + "\n", encoding="utf-8")
    os.chmod(new, mode)
    os.replace(new, path)
