"""The rooms of all baselines, each with its parts and rows."""

from __future__ import annotations

from coattn.baselines import h2o, oracle, quest, random, streaming, tova
from coattn.baselines.duo import row as duo
from coattn.baselines.infinigen import row as infinigen
from coattn.baselines.pqcache import row as pqcache
from coattn.baselines.snapkv import row as snapkv

ROOMS = (streaming, quest, snapkv, h2o, tova, duo, infinigen, pqcache, oracle, random)

PARTS = tuple(part for room in ROOMS for part in getattr(room, "PARTS", ()))
METHODS = tuple(row for room in ROOMS for row in room.METHODS)
NEEDS = {word: text for room in ROOMS for word, text in getattr(room, "NEEDS", {}).items()}
