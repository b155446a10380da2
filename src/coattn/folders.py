"""Where coattn keeps files of its own."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$COATTN_CACHE`, else the user's cache folder. Makes nothing."""
    if chosen := os.environ.get("COATTN_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "coattn"
