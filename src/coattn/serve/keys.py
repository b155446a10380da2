"""Where a server's API keys come from."""

from __future__ import annotations

import os
from pathlib import Path

from coattn.errors import InputError
from coattn.text import decode, read_bytes

KEY = "COATTN_API_KEY"
"""The environment variable that holds a key."""


def read_keys(file: str | None) -> tuple[str, ...]:
    """Keys of a file, one per line, and of the environment. Empty lines and those that begin with # are left out."""
    found: list[str] = []
    if file is not None:
        raw = read_bytes(Path(file))
        lines = [line.strip() for line in decode(raw, file).splitlines()] if raw.strip() else []
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InputError(f"{file} holds no API key.", "Write one on each line.")
    if KEY in os.environ:
        own = os.environ[KEY].strip()
        if not own:
            raise InputError(f"{KEY} is empty.", "Set it to a key, or unset it.")
        found.append(own)
    return tuple(found)
