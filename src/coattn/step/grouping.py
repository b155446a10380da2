"""Layers of one kind are a group: which there are, and whether the budgets can hold them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import HostBridge
from coattn.method.row import Composed, Parts, compose
from coattn.method.table import SLIDING
from coattn.parts.executor.gpu import Gpu
from coattn.parts.handover.bridges import ThreadBridge
from coattn.step.layer_group import LayerGroup


def make_groups(composed: Composed, spec: CacheSpec) -> list[LayerGroup]:
    """Groups that are not open yet, sliding windows first, then the method's. Raises BudgetError for what they need.

    spec: of all layers of the model. Layers that look back a fixed number of tokens by themselves have a bounded
    window under every method.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, shape in spec.layers.items():
        where = (shape.stage, str(shape.device))
        kinds.setdefault((shape.sliding_window, shape.kv_heads, shape.head_dim, shape.dtype, *where), []).append(i)
    groups = []
    # windows first: their need is fixed, the method takes what is left
    for (window, *_), members in sorted(kinds.items(), key=lambda item: item[0][0] is None):
        row = composed if window is None else compose(SLIDING, recent=window)
        own = {i: spec.layers[i] for i in members}
        groups.append(_make(row.build(), replace(spec, layers=own, ledger=spec.ledger.part(own[members[0]].stage))))
    _require(groups, composed, spec)
    return groups


def _make(parts: Parts, spec: CacheSpec) -> LayerGroup:
    plan = parts.maintenance.plan_memory(spec, parts.config, parts.index, parts.select)
    cache = KVCache(parts.config, replace(spec, plan=plan), parts.index)
    gpu = Gpu()
    place = gpu if parts.executor.name == gpu.name else parts.executor
    bridge = ThreadBridge() if spec.device.type == "cuda" else HostBridge()
    return LayerGroup(cache, parts.index, parts.select, gpu, place, parts.schedule, parts.maintenance, bridge)


def _require(groups: Sequence[LayerGroup], composed: Composed, spec: CacheSpec) -> None:
    # in an engine, the least is for the shortest of sequences; what a longer one needs is said when it comes
    amount = "one sequence" if spec.seqs == 1 else f"{spec.seqs} sequences"
    if not spec.fixed and spec.tokens is not None:
        amount += f" of {spec.tokens:,} tokens"
    for stage in sorted({group.stage for group in groups}):
        least = sum(_least_bytes(group) for group in groups if group.stage == stage)
        spec.ledger.part(stage).require("gpu", least, f"Method {composed.method.name!r} for {amount}")


def _least_bytes(group: LayerGroup) -> int:
    """Of the GPU tier, what it cannot do without."""
    spec, config, least = group.cache.spec, group.cache.config, group.cache.gpu.min_bytes()
    return least + group.index.gpu_bytes(spec, config) + group.executor.min_gpu_bytes(spec, config)
