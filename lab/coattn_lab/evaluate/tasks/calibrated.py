"""Files that a row cannot do without, or does badly without: made when nobody gave one, once for each folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coattn.hf.load import Loaded
from coattn.hf.sketches import with_sketches
from coattn.method.row import compose
from coattn.text import Text
from coattn.tools.calibrate.codebooks import write_codebook
from coattn.tools.calibrate.heads import write_heads
from coattn.tools.calibrate.skews import write_skew
from coattn_lab.evaluate.tasks.row import Row

FILES = ("heads", "skew", "codebook")
"""Parameters that name a file which `coattn calibrate` makes: `duo`, `infinigen`, `hcattention`."""
Say = Callable[[str], None]


def calibrated(row: Row, loaded: Loaded, text: Text, folder: Path, say: Say) -> Row:
    """The row with the files that it lacks. folder: where they lie, and are found again."""
    measured = with_sketches(row.composed, loaded)
    if measured is not row.composed:
        return replace(row, composed=measured)
    params = row.composed.params
    lacking = [name for name in FILES if name in params and params[name] is None]
    if not lacking or (lacking == ["codebook"] and params["groups"] == 0):
        return row
    made = {name: _file(name, params, loaded, text, folder, say) for name in lacking}
    composed = compose(row.composed.method, **{**params, **{name: str(path) for name, path in made.items()}})
    origin = dict.fromkeys(made, f"made for this run, of {text.name} ({text.sha256[:12]})")
    return replace(row, composed=composed, files={**row.files, **origin})


def _file(name: str, params: Any, loaded: Loaded, text: Text, folder: Path, say: Say) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    small = loaded.model.get_input_embeddings().weight.device.type == "cpu"
    if name == "heads":
        path = folder / "heads.json"
        if not path.exists():
            say(f"duo has no labels of its heads: making {path} of {text.name}")
            usual = (2048,) if small else (2048, 4096)
            _whole(path, lambda at: write_heads(loaded, text, at, usual=usual, samples=2))
    elif name == "skew":
        path = folder / "skew.safetensors"
        if not path.exists():
            say(f"infinigen has no skew: making {path} of {text.name}")
            _whole(path, lambda at: write_skew(loaded, text, at, length=2048))
    else:
        groups, centroids = params["groups"], params["centroids"] or 8192
        path = folder / f"codebook_{groups or 'half'}_{centroids}.safetensors"
        if not path.exists():
            say(f"hcattention has no codebook: making {path} of {text.name}")
            length, samples = (2048, 1) if small else (8192, 3)
            _whole(
                path,
                lambda at: write_codebook(
                    loaded, text, at, groups=groups, centroids=centroids, samples=samples, length=length
                ),
            )
    return path


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    """The file appears when it is whole."""
    fresh = path.with_name(f".{path.name}")
    write(fresh)
    fresh.replace(path)
