"""How a model's keys spread, measured once for each model: by that `auto` sketches the keys of every prompt."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError, InputError
from coattn.folders import cache_dir
from coattn.hf.architectures import describe_layers
from coattn.hf.converted import Progress, silent
from coattn.hf.fingerprint import config_fingerprint, read_by
from coattn.hf.forward import Session
from coattn.hf.load import Loaded
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.sketch import SPREADS, Spread, spread_of
from coattn.method.row import Composed, compose
from coattn.method.table import METHODS
from coattn.step.probe import Collected
from coattn.step.runtime import Runtime
from coattn.text import Text, default_text
from coattn.types import Step

PIECES = 8
"""Stretches of a text that are read, each by itself."""
CHANNEL_TOKENS = 4
"""Tokens of each, for every channel of a head."""
SKIPPED_TOKENS = 4
"""First tokens of each: their keys are like no others."""
LETTERS = 64
"""Of a text for each token that is read: pieces are drawn from so much of it."""
LONGEST = 131_072
"""Positions over which they are spread, where the model has so many: rotation turns keys differently at each."""

log = logging.getLogger("coattn")


@torch.inference_mode()
def measure(session: Session, ids: Tensor, most: int | None, progress: Progress = silent) -> dict[int, Spread]:
    """By layer, from stretches of a text `[tokens]`, evenly spaced. most: positions that the model has."""
    length = min(CHANNEL_TOKENS * max(shape.head_dim for shape in session.layers), len(ids), most or LONGEST)
    if length <= SKIPPED_TOKENS:
        raise InputError(f"The text has {len(ids)} tokens, too few to measure keys.", "Give a longer text.")
    probe, furthest = Collected(len(session.layers)), min(LONGEST, most or LONGEST) - length
    for i in range(PIECES):
        start, first = (room * i // (PIECES - 1) for room in (len(ids) - length, furthest))
        part = ids[start : start + length].to(session.device)
        runtime = Runtime(
            session.layers, compose(METHODS["full"]), Ledger(), 1, length, probes=[probe], states=session.states
        )
        try:
            running = runtime.begin(Step.of((0,), (0,), (length,)))
            positions = torch.arange(first, first + length, device=session.device)
            session.forward(runtime, running, part, positions, None)
            runtime.commit(running)
        finally:
            runtime.release()
        progress("measuring keys", i + 1, PIECES)
    found = enumerate(probe.layers(SKIPPED_TOKENS))
    return {i: Spread(*(x.float() for x in spread_of(keys, moment))) for i, (keys, moment) in found}


def write_sketch(
    loaded: Loaded, text: Text, target: Path, session: Session | None = None, progress: Progress = silent
) -> dict[str, Any]:
    """Writes a file for the parameter `sketch` -> what `coattn calibrate` says of it. session: where one is open."""
    with Session(loaded.model) if session is None else nullcontext(session) as opened:
        shapes = opened.layers
        most = PIECES * CHANNEL_TOKENS * max(shape.head_dim for shape in shapes)
        ids = loaded.tokenizer(text.body[: LETTERS * most], return_tensors="pt", verbose=False).input_ids[0]
        spreads = measure(opened, ids, loaded.positions, progress)
    tokens = min(len(ids), most)
    origin = TextOrigin(loaded.name, text.name, text.sha256, tokens, tuple(shape.mark for shape in shapes))
    SPREADS.save(target, spreads, origin)
    return {"sketch": str(target), "model": loaded.name, "text": text.name, "tokens": tokens, "layers": len(shapes)}


def folder() -> Path:
    """Where measured files are kept."""
    return cache_dir() / "sketches"


def with_sketches(
    composed: Composed, loaded: Loaded, session: Session | None = None, progress: Progress = silent
) -> Composed:
    """The row, with the model's own file where it takes one and none was given; measured now if there is none yet."""
    if composed.exact or loaded.tokenizer is None or composed.params.get("sketch", "") is not None:
        return composed
    known = [
        (f"{s.mark:.3e}" if s.mark is not None else read_by(loaded.model), str(s.dtype))
        for s in describe_layers(loaded.model)
    ]
    about = repr((SPREADS.form, config_fingerprint(loaded.model), known))
    path = folder() / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.safetensors"
    try:
        SPREADS.read_origin(str(path))
    except ConfigError:  # it is not there, or is damaged
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sketch(loaded, default_text(), unfinished, session, progress)
            os.replace(unfinished, path)
        except OSError as error:
            log.warning("What `auto` measures of a model cannot be kept in %s: %s.", path.parent, error.strerror)
            return composed
        finally:
            with suppress(OSError):
                unfinished.unlink()
    return replace(composed, params={**composed.params, "sketch": str(path)})
