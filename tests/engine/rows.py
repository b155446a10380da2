"""Every row with parameters that leave much out of short texts."""

from __future__ import annotations

from typing import Any

from tests.methods.test_matrix import SMALL, SMALL_CACHE

from coattn.methods import METHODS

BLOCK = 8
OWN = ("partial_keys", "prompt_codes", "sketch", "sums", "last_weights")
"""Indexes whose numbers of a sequence are not in its blocks: their rows share nothing, and read turns again."""


def options(name: str) -> dict[str, Any]:
    """Parameters of a row of the table, with blocks of eight tokens where the rule leaves it to us."""
    row = METHODS[name]
    fits = row.select not in ("oracle", "random", "prompt_top")
    given = {**SMALL[row.select], **SMALL_CACHE[row.cache], **({"block": BLOCK} if fits else {})}
    more = {"scout": {"budget": 80}, "scout-paper": {"budget": 80}, "quest": {"dense_layers": 0}, "hgca": {"beta": 0.5}}
    more["duo"] = {"heads": "alternate"}
    return given | more.get(name, {})
