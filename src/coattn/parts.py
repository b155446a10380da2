"""The parts that rows can name. A new part is one file and one line here."""

from __future__ import annotations

from coattn.cache.config import Evicting, OnGpu, Recent, Tiered, Values
from coattn.execute.cpu import Cpu
from coattn.execute.gpu import Gpu
from coattn.execute.pull import Pull
from coattn.index.averages import Averages
from coattn.index.codes.index import Codes
from coattn.index.digests import Digests
from coattn.index.none import NoIndex
from coattn.index.partial_keys import PartialKeys
from coattn.index.prompt_codes import PromptCodes
from coattn.index.sketch import Sketch
from coattn.index.weights import LastWeights, Sums
from coattn.part import Part
from coattn.schedule.inline import Inline
from coattn.schedule.layer_ahead import LayerAhead
from coattn.schedule.same_layer import SameLayer
from coattn.select.alpha_below_max import AlphaBelowMax
from coattn.select.code_top import CodeTop
from coattn.select.digest_top import DigestTop
from coattn.select.everything import Everything
from coattn.select.maw_threshold import MawThreshold
from coattn.select.oracle import Oracle
from coattn.select.pq_top_p import PqTopP
from coattn.select.prompt_top import PromptTop
from coattn.select.random import Random
from coattn.select.retrieval_heads import RetrievalHeads
from coattn.select.weight_floor import WeightFloor
from coattn.upkeep.entries.entries import Entries
from coattn.upkeep.evict.heavy_hitters import HeavyHitters
from coattn.upkeep.evict.one_set import OneSet
from coattn.upkeep.first_queries import FirstQueries
from coattn.upkeep.fit import Fit
from coattn.upkeep.last_queries import LastQueries
from coattn.upkeep.none import NoUpkeep
from coattn.upkeep.prompt_books import PromptBooks
from coattn.upkeep.recall.recall import Recall

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
    NoUpkeep,
    Recall,
    Entries,
    LastQueries,
    HeavyHitters,
    OneSet,
    FirstQueries,
    PromptBooks,
    Fit,
)

AXES = ("cache", "index", "select", "place", "schedule", "upkeep")
PARTS: dict[str, dict[str, type[Part]]] = {
    axis: {part.name: part for part in _ALL if part.axis == axis} for axis in AXES
}
"""Axis -> name -> part."""
