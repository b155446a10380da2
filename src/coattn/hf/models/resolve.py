"""One word for a model, wherever one is asked for: a catalog name, a local folder, a GGUF file or a hub name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from coattn.errors import ModelError
from coattn.hf.converted import Progress, silent
from coattn.hf.families import check_config
from coattn.hf.models.fetch import CATALOG, get_model

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
KNOWN = "Give the name of a model of coattn ({}), a local folder, a GGUF file or a hub name (owner/model)."
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
LAYOUT = "A model folder holds config.json, model.safetensors (or shards with an index) and a tokenizer."
AGAIN = "Copy or download the file again."


def resolve(name: str | Path, *, on_progress: Progress = silent) -> Path | str:
    """The folder or GGUF file to load `name` from, or `name` itself when it is a hub name.

    A catalog name is fetched and converted first when missing (network, about a minute). An existing path is checked to
    be the folder of a model that coattn runs; PyTorch is not imported before its weights are looked at. A catalog name
    wins over a folder of the same name: write `./smollm2` for the folder.
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


def check_folder(folder: Path) -> None:
    """Raise unless `folder` holds the config of a model that coattn runs, whole safetensors and a tokenizer.

    Reads the config and the headers of the weights, not the weights: milliseconds.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file, not a model folder.", LAYOUT)
    try:
        names = {path.name for path in folder.iterdir()}
        if "config.json" not in names:
            raise ModelError(f"The folder {folder} has no config.json, so it is not a model.", LAYOUT)
        check_config(read_config(folder / "config.json"))
        for shard in shards(folder, names):
            with shard.open("rb"), safe_open(shard, "pt"):  # reads the header and compares it with the file's size
                pass
    except OSError as error:
        raise ModelError(
            f"The model folder {folder} cannot be read: {error.strerror or error}.",
            "Check its permissions, and those of the files in it.",
        ) from error
    except SafetensorError as error:
        raise ModelError(f"{shard} is truncated or not a safetensors file: {error}.", AGAIN) from None
    if not names.intersection(TOKENIZERS):
        raise ModelError(f"The model folder {folder} has no tokenizer.", LAYOUT)


def shards(folder: Path, names: set[str]) -> list[Path]:
    """The files that hold a model's weights, of those in its folder that have these names."""
    if WEIGHTS in names:
        return [folder / WEIGHTS]
    if INDEX in names:
        weight_map = _read_object(folder / INDEX).get("weight_map")
        listed = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        missing = [shard for shard in listed if shard not in names]
        if not listed or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"has an {INDEX} that names no weights"
            raise ModelError(f"The model folder {folder} {what}.", "Copy or download the missing files again.")
        return [folder / shard for shard in listed]
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ModelError(
            f"The model folder {folder} holds pickled weights only, which coattn does not open.",
            "Save it as safetensors (`model.save_pretrained`) where you trust it, and use that folder.",
        )
    raise ModelError(f"The model folder {folder} has no weights in safetensors.", LAYOUT)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json. Raises ModelError if it is not one."""
    found = _read_object(path)
    if not isinstance(found.get("model_type"), str):
        raise ModelError(f"{path} does not name a model_type.", LAYOUT)
    for name, kind in (("text_config", dict), ("quantization_config", dict), ("layer_types", list)):
        if not isinstance(found.get(name) or kind(), kind):
            raise ModelError(f"{name} in {path} is {found[name]!r}, which no model has.", AGAIN)
    return found


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ModelError(f"{path} is not valid JSON.", AGAIN) from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object.", AGAIN)
    return data
