"""What two sides say of themselves before anything is read, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coattn.transfer.channel import Frame
from coattn.types import LayerShape

FORMAT = 3
COMPARED = ("configuration", "weights", "tokenizer")
"""Fingerprints that both sides must have alike. The configuration has the rotary embedding, the weights their dtype."""


def introduce(fingerprints: Mapping[str, str], layers: Sequence[LayerShape], vocabulary: int) -> Frame:
    """The first frame of a caller. Its shapes are what a `Layout` is made of."""
    return {
        "op": "open",
        "format": FORMAT,
        "fingerprints": {name: fingerprints[name] for name in COMPARED},
        "shapes": [vocabulary, *([s.kv_heads, s.q_heads, s.head_dim, str(s.dtype)] for s in layers)],
    }


def mismatch(theirs: Frame, own: Frame) -> str | None:
    """Why a caller that introduced itself so is not read for; None where it is."""
    if theirs["op"] != "open" or theirs.get("format") != FORMAT:
        return f"It speaks another version than {FORMAT} of this protocol."
    known = theirs.get("fingerprints")
    wrong = [k for k in COMPARED if not isinstance(known, dict) or known.get(k) != own["fingerprints"][k]]
    if wrong:
        return f"It has another {' and another '.join(wrong)}."
    return None if theirs.get("shapes") == own["shapes"] else "Its layers have other shapes or another dtype."
