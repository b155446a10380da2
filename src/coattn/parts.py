"""The parts that rows can name. A new part is one file and one line here."""

from __future__ import annotations

from coattn.part import Part
from coattn.place.cpu import Cpu
from coattn.place.cpu_values import CpuValues
from coattn.place.gpu import Gpu
from coattn.place.pull import Pull
from coattn.place.tail_mean import TailMean
from coattn.schedule.inline import Inline
from coattn.schedule.layer_ahead import LayerAhead
from coattn.schedule.same_layer import SameLayer
from coattn.select.average_weight import AverageWeight
from coattn.select.digest_top import DigestTop
from coattn.select.everything import Everything
from coattn.select.oracle import Oracle
from coattn.select.pq_top_p import PqTopP
from coattn.select.random import Random
from coattn.select.sinks_recent import SinksRecent
from coattn.select.top_weight import TopWeight
from coattn.store.arena import Arena
from coattn.store.coded.store import Coded
from coattn.store.contextual.store import Contextual
from coattn.store.digested.pool import DigestPool
from coattn.store.digested.residents import Residents
from coattn.store.pool import Pool
from coattn.store.window import Window

_ALL: tuple[type[Part], ...] = (
    Pool,
    DigestPool,
    Window,
    Arena,
    Residents,
    Contextual,
    Coded,
    Everything,
    SinksRecent,
    AverageWeight,
    TopWeight,
    Oracle,
    Random,
    DigestTop,
    PqTopP,
    Gpu,
    Cpu,
    Pull,
    CpuValues,
    TailMean,
    Inline,
    SameLayer,
    LayerAhead,
)

PARTS: dict[str, dict[str, type[Part]]] = {
    axis: {part.name: part for part in _ALL if part.axis == axis} for axis in ("store", "select", "place", "schedule")
}
"""Axis -> name -> part."""
