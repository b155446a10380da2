"""Models and cards that plans know by name."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, ModelError, UnsupportedError
from coattn.hf.models.resolve import HUB_NAME, is_gguf, read_config
from coattn.units import parse_bytes

GIB = 1 << 30
SMALL_SIZE = 4096
"""Numbers without a unit, or in GB, below this are gibibytes."""
HBM_SHARE = 0.95
"""Of a vendor's figure, what a large read reaches: 4,640 of 4,800 GB/s on an H200, less on other cards."""
LEAST_CAPABILITY = 80
HUB_SECONDS = 5
UNKNOWN_CARD = {"hbm_gbps": 900.0, "pcie_gbps": 25.0, "tflops": 120.0}
"""Of a GPU that is given by its memory alone: about an RTX 4090."""


@dataclass(frozen=True)
class Card:
    """A GPU, or several of one kind. Rates in bytes and operations a second, those of all together but for `pcie`."""

    name: str
    memory: int
    hbm: float
    pcie: float
    flops: float
    count: int = 1


@cache
def _data(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((files(__package__) / name).read_text(encoding="utf-8"))
    return found


def parse_size(text: str, name: str) -> int:
    """Memory of a card or a machine: `24` and `24GB` are `24GiB`, as it is sold."""
    plain = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(GB?)?\s*", text, re.IGNORECASE)
    sold = plain is not None and float(plain[1]) < SMALL_SIZE
    return parse_bytes(f"{plain[1]}GiB" if plain and sold else text, name) or 0


def cards() -> list[str]:
    """Names that `find_card` takes."""
    return sorted(_data("cards.json"))


def cards_by_memory() -> list[tuple[str, Card]]:
    """Those that coattn runs on, with their names, the smallest first."""
    names = [name for name, card in _data("cards.json").items() if card["capability"] >= LEAST_CAPABILITY]
    return sorted(((name, find_card(name)) for name in names), key=lambda named: named[1].memory)


def find_card(text: str) -> Card:
    """`rtx4090`, `24GB` or `2xrtx3090`. Raises ConfigError for an unknown name, UnsupportedError for an old card."""
    count, rest = 1, text.strip()
    if several := re.fullmatch(r"(\d+)\s*[x*]\s*(.+)", rest):
        count, rest = max(1, int(several[1])), several[2]
    key = re.sub(r"nvidia|geforce|tesla|[\s_-]", "", rest.lower())
    names = {re.sub(r"-", "", name): name for name in _data("cards.json")}
    if key in names or f"rtx{key}" in names:
        found = _data("cards.json")[names.get(key) or names[f"rtx{key}"]]
        if found["capability"] < LEAST_CAPABILITY:
            raise UnsupportedError(
                f"coattn needs a GPU of compute capability 8.0 or newer, and the {found['name']} has "
                f"{found['capability'] / 10}.",
                "Take an RTX 30, A10, A100 or a newer card; without a GPU everything runs on the CPU.",
            )
        name, memory = found["name"], found["memory_gib"] * GIB
    elif re.match(r"[0-9.]", key):
        found, memory = UNKNOWN_CARD, parse_size(rest, "--gpu")
        name = f"a GPU with {memory / GIB:.0f} GiB"
    else:
        close = difflib.get_close_matches(key, names, n=1)
        meant = f"Did you mean {names[close[0]]}? " if close else ""
        raise ConfigError(
            f"There is no card {text!r} in coattn's list.",
            f"{meant}Give its memory, such as 24GB, or one of {', '.join(cards())}.",
        )
    return Card(
        name if count == 1 else f"{count} x {name}",
        memory * count,
        1e9 * HBM_SHARE * found["hbm_gbps"],
        1e9 * found["pcie_gbps"],
        1e12 * found["tflops"],
        count,
    )


def models() -> list[str]:
    """Hub names of the models whose configs come with coattn."""
    return sorted(_data("models.json"))


def find_config(name: str) -> tuple[str, Mapping[str, Any]]:
    """The model's name and its config.json, from a folder, a config.json, a known name or the hub's cache.

    A hub name that is not known is asked of the hub: its config.json alone is fetched. Raises ModelError.
    """
    path = Path(name).expanduser()
    for file in (path, path / "config.json"):
        if isfile(file) and file.suffix == ".json":
            return (path.name if file != path else path.parent.name or path.name), read_config(file)
    if is_gguf(path) and isfile(path):
        from coattn.hf.kinds import config_of

        return path.name, config_of(path)
    if isdir(path) or isfile(path):
        wrong = f"The folder {path} has no" if isdir(path) else f"The file {path} is neither a GGUF file nor a"
        raise ModelError(f"{wrong} config.json.", "Give the folder of a model, or its hub name.")
    found = _known(name)
    if found is not None:
        return found, _data("models.json")[found]
    return name, _fetch(name)


def close_to(name: str) -> str:
    """`Did you mean ...? `, where a known model is called nearly so."""
    by_end = {known.rpartition("/")[2].lower(): known for known in models()}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), by_end, n=1)
    return f"Did you mean {by_end[close[0]]}? " if close else ""


def _known(name: str) -> str | None:
    wanted = name.lower()
    ends = [known for known in models() if wanted in (known.lower(), known.rpartition("/")[2].lower())]
    if ends:
        return ends[0]
    # llama-3-8b for Meta-Llama-3-8B-Instruct
    near = [known for known in models() if re.search(rf"(^|[/-]){re.escape(wanted)}(-|$)", known.lower())]
    return min(near, key=len) if near and "/" not in wanted else None


def _fetch(name: str) -> Mapping[str, Any]:
    """The config.json of a model on the hub, or of its copy in the hub's cache. One short request first: downloads
    retry for half a minute."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    hint = f"{close_to(name)}Give a folder, a config.json, a name on the hub, or one of `coattn plan --list`."
    if "/" not in name or not HUB_NAME.fullmatch(name):
        raise ModelError(f"There is no folder {name}, and no model of that name is known.", hint)
    try:
        file: Any = try_to_load_from_cache(name, "config.json")
        if not isinstance(file, str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
            file = hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS)
    except Exception as error:  # what the client raises differs between its releases
        raise ModelError(f"The config.json of {name} cannot be had: the hub does not answer with it.", hint) from error
    return read_config(Path(file))
