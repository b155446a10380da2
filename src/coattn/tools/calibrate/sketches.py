"""How a model's keys spread, from a text of the user's: what an engine measures by itself from one of its own."""

from pathlib import Path
from typing import Any

from coattn.hf.converted import Progress, silent
from coattn.hf.forward import Session
from coattn.hf.load import Loaded
from coattn.hf.sketches import write_spreads
from coattn.text import Text


def write_sketch(loaded: Loaded, text: Text, target: Path, *, progress: Progress = silent) -> dict[str, Any]:
    """Writes what the method's parameter `sketch` takes -> what `coattn calibrate` says."""
    with Session(loaded.model) as session:
        tokens = write_spreads(loaded, session, text, target, progress)
        return {
            "sketch": str(target),
            "model": loaded.name,
            "text": text.name,
            "tokens": tokens,
            "layers": len(session.layers),
        }
