"""The parts that rows can name. A new part is one file and one line here."""

from __future__ import annotations

from coattn.auto.index import Sketch
from coattn.auto.maintenance import Fit
from coattn.auto.select import WeightFloor
from coattn.baselines.duo.select import RetrievalHeads
from coattn.baselines.evicting.heavy_hitters import HeavyHitters
from coattn.baselines.evicting.index import LastWeights, Sums
from coattn.baselines.evicting.one_set import OneSet
from coattn.baselines.infinigen.index import PartialKeys
from coattn.baselines.infinigen.maintenance import FirstQueries
from coattn.baselines.infinigen.select import AlphaBelowMax
from coattn.baselines.oracle import Oracle
from coattn.baselines.pqcache.index import PromptCodes
from coattn.baselines.pqcache.maintenance import PromptBooks
from coattn.baselines.pqcache.select import CodeTop
from coattn.baselines.random import Random
from coattn.baselines.snapkv.maintenance import LastQueries
from coattn.baselines.snapkv.select import PromptTop
from coattn.cache.config import Evicting, OnGpu, Recent, Tiered, Values
from coattn.part import Part
from coattn.parts.executor.cpu import Cpu
from coattn.parts.executor.gpu import Gpu
from coattn.parts.executor.pull import Pull
from coattn.parts.index.averages import Averages
from coattn.parts.index.codes.index import Codes
from coattn.parts.index.digests import Digests
from coattn.parts.index.none import NoIndex
from coattn.parts.maintenance.entries.entries import Entries
from coattn.parts.maintenance.none import NoMaintenance
from coattn.parts.maintenance.recall.recall import Recall
from coattn.parts.schedule.inline import Inline
from coattn.parts.schedule.layer_ahead import LayerAhead
from coattn.parts.schedule.same_layer import SameLayer
from coattn.parts.select.digest_top import DigestTop
from coattn.parts.select.everything import Everything
from coattn.parts.select.maw_threshold import MawThreshold
from coattn.parts.select.pq_top_p import PqTopP

_ALL: tuple[type[Part], ...] = (
    OnGpu,
    Recent,
    Evicting,
    Tiered,
    Values,
    NoIndex,
    Digests,
    Codes,
    Averages,
    Sums,
    LastWeights,
    PartialKeys,
    PromptCodes,
    Sketch,
    Everything,
    MawThreshold,
    DigestTop,
    PqTopP,
    PromptTop,
    RetrievalHeads,
    AlphaBelowMax,
    CodeTop,
    Oracle,
    Random,
    WeightFloor,
    Gpu,
    Cpu,
    Pull,
    Inline,
    SameLayer,
    LayerAhead,
    NoMaintenance,
    Recall,
    Entries,
    LastQueries,
    HeavyHitters,
    OneSet,
    FirstQueries,
    PromptBooks,
    Fit,
)

AXES = ("cache", "index", "select", "executor", "schedule", "maintenance")
PARTS: dict[str, dict[str, type[Part]]] = {
    axis: {part.name: part for part in _ALL if part.axis == axis} for axis in AXES
}
"""Axis -> name -> part."""
