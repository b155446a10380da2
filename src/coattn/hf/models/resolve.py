"""One word for a model, wherever one is asked for: a catalog name, a local folder, a GGUF file or a hub name."""

from __future__ import annotations

import re
from pathlib import Path

from coattn.errors import ModelError
from coattn.hf.converted import Progress, silent
from coattn.hf.models.catalog import CATALOG
from coattn.hf.models.fetch import get_model
from coattn.hf.models.folder import check_folder

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
KNOWN = "Give the name of a model of coattn ({}), a local folder, a GGUF file or a hub name (owner/model)."


def resolve(name: str | Path, *, on_progress: Progress = silent) -> Path | str:
    """The folder or GGUF file to load `name` from, or `name` itself when it is a hub name.

    A catalog name is fetched and converted first when missing (network, about a minute). An existing path is
    checked to be a model folder. A catalog name wins over a folder of the same name: write `./smollm2` for
    the folder.
    """
    text = str(name)
    if not isinstance(name, Path) and text in CATALOG:
        return get_model(text, on_progress=on_progress)
    hint = KNOWN.format(", ".join(sorted(CATALOG)))
    if not text or "\0" in text:
        raise ModelError("The model has no name.", hint)
    folder = Path(text).expanduser()
    try:
        exists = folder.exists()
    except OSError as error:
        raise ModelError(
            f"The model folder {folder} cannot be read: {error.strerror or error}.",
            "Check its permissions, and those of the folders above it.",
        ) from error
    if exists:
        if not is_gguf(folder):
            check_folder(folder)
        return folder
    if is_gguf(Path(text)):
        raise ModelError(f"There is no file {folder}.", hint)
    if isinstance(name, Path) or not HUB_NAME.fullmatch(text):
        raise ModelError(f"There is no model folder {folder}.", hint)
    return text


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, rather than a folder that is called so."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()
