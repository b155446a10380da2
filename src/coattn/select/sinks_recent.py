"""StreamingLLM: the first tokens and the most recent ones (Xiao et al., 2023, section 3.2).

Keys keep the rotary position at which they were written; the paper renumbers positions inside its cache, which matters
only past the model's trained length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coattn.select.base import Stored


@dataclass
class SinksRecent(Stored):
    """Attends to what a window holds: sinks and recent tokens."""

    name = "sinks_recent"
    needs = frozenset({"window"})
    exact = False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"recent": tokens}
