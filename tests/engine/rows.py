"""Every row with parameters that leave much out of short texts."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.methods.test_matrix import SMALL, SMALL_CACHE

from coattn.hf.forward import Session
from coattn.hf.sketches import measure
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.sketch import SPREADS
from coattn.method.registry import PARTS
from coattn.method.table import METHODS

BLOCK = 8
CODED = METHODS["full"].variant("full,gpu_dtype=int4", "Lossy. `full` in 4 bits.", gpu_dtype="int4")
ROWS = {**METHODS, CODED.name: CODED}
"""Those of the table, and one whose tokens are rounded where they lie."""


def options(name: str) -> dict[str, Any]:
    """Parameters of a row of the table, with blocks of eight tokens where the rule leaves it to us."""
    row = ROWS[name]
    fits = not any("block" in getattr(PARTS[axis][name], "fixes", {}) for axis, name in row.parts())
    given = {**SMALL.get(row.select, {}), **SMALL_CACHE[row.cache], **({"block": BLOCK} if fits else {})}
    more = {
        "scout": {"budget": 80},
        "scout-paper": {"budget": 80},
        "quest": {"dense_layers": 0},
        "hgca": {"beta": 0.5},
        "duo": {"heads": "alternate"},
    }
    return given | more.get(name, {})


def shares(name: str) -> bool:
    """Whether requests share what is stored: it is all there, as it was, whoever it is of."""
    row = ROWS[name]
    return resumes(name) and row.cache not in ("recent", "values") and not PARTS["index"][row.index].by_sequence  # type: ignore[attr-defined]


def resumes(name: str) -> bool:
    """Whether a sequence can come back to all parts of a row."""
    row = ROWS[name]
    return PARTS["index"][row.index].resumes and PARTS["maintenance"][row.maintenance].resumes  # type: ignore[attr-defined]


def measured(name: str, model: Any) -> dict[str, Any]:
    """What an engine with a tokenizer measures of a model: without it the first sequences decide, and who fails has a
    part in that."""
    return {"sketch": _sketch(model)} if ROWS[name].index == "sketch" else {}


@cache
def _sketch(model: Any) -> str:
    path = Path(tempfile.mkdtemp()) / "sketch.safetensors"
    with Session(model) as session:
        spreads = measure(session, torch.randint(0, session.vocabulary, (600,)), 160)
        marks = tuple(shape.mark for shape in session.layers)
    SPREADS.save(path, spreads, TextOrigin("tiny", "random", "0", 600, marks))
    return str(path)
