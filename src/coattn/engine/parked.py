"""A sequence that waits outside the slots, and what it has stored as tensors with names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache import keep
from coattn.cache.blocks import BlockMemory
from coattn.cache.keep import Kept
from coattn.engine.prefix import Node
from coattn.errors import InputError
from coattn.step.runtime import LayerGroup, Runtime


@dataclass(eq=False)
class Parked:
    """A sequence that is in no slot: its tokens are stored, and the next turn goes on after them."""

    tokens: list[int]
    """Those that are stored."""
    clean: int
    """The first so many were read, none of them after one that a lossy step had stored."""
    groups: list[Kept]
    nodes: list[Node] = field(default_factory=list)
    moved: dict[str, Tensor] = field(default_factory=dict)
    """Everything, once its blocks in GPU memory were given to others; then `groups` has none."""
    away: str = ""
    """The same on disk: the name of its file."""

    @property
    def in_place(self) -> bool:
        """Whether its blocks are its own still."""
        return not self.moved and not self.away

    @property
    def moved_bytes(self) -> int:
        return sum(x.nbytes for x in self.moved.values())


def pack(runtime: Runtime, parked: Parked) -> dict[str, Tensor]:
    """Everything of a sequence, on the host: `0.blocks.3` is what group 0 has in the blocks of layer 3."""
    if parked.moved:
        return dict(parked.moved)
    found: dict[str, Tensor] = {}
    for g, (group, kept) in enumerate(zip(runtime.groups, parked.groups, strict=True)):
        found |= {f"{g}.{name}": x for name, x in kept.tensors.items()}
        found |= {f"{g}.book.{layer}": x.to("cpu", copy=True) for layer, x in _books(group).items()}
        for name, memory in memories(group).items():
            for layer, x in keep.contents(memory, kept.ids).items():
                partial = len(kept.ids) * group.cache.block > len(parked.tokens)
                if partial and name == "blocks":
                    x = keep.blank(x, len(parked.tokens), group.cache.block)
                elif partial:
                    x[-1] = 0  # written anew when the block is full
                found[f"{g}.{name}.{layer}"] = x
    return found


def unpack(runtime: Runtime, tensors: Mapping[str, Tensor], tokens: list[int], clean: int) -> Parked:
    """Checks every tensor, then takes blocks and stores. Where it raises InputError, BudgetError or whatever storing
    fails with, it holds no block."""
    groups, fills = [], []
    rest = set(tensors)
    for g, group in enumerate(runtime.groups):
        own = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{g}.")}
        rest -= {f"{g}.{name}" for name in own}
        blocks = _check(group, own, len(tokens))
        fills.append((group, own, blocks))
    if rest:
        raise InputError(f"it holds {sorted(rest)[0]!r}, which this model has not")
    taken: list[tuple[Any, list[int]]] = []
    try:
        for group, own, blocks in fills:
            table, kept = keep.table_of(group.cache), Kept()
            if table is not None:
                kept.ids = table.fresh(blocks)
                taken.append((table, kept.ids))
            kept.tensors = {name: x for name, x in own.items() if name.split(".")[0] in OWN}
            groups.append(kept)
        for (group, own, _), kept in zip(fills, groups, strict=True):
            books = _library(group)
            for name, x in own.items():
                if name.startswith("book."):
                    books.adopt(int(name.removeprefix("book.")), x)
            for name, memory in memories(group).items():
                keep.fill(memory, kept.ids, {layer: own[f"{name}.{layer}"] for layer in memory.layers})
    except BaseException:
        for table, ids in taken:
            table.drop(ids)
        raise
    return Parked(tokens, clean, groups)


def averages_of(group: LayerGroup) -> dict[int, Any]:
    """By layer: what its index keeps up for every entry of the GPU's blocks."""
    found = {layer: group.index.observed(layer) for layer in group.cache.spec.layers}
    return {layer: average.values for layer, average in found.items() if average is not None}


OWN = ("window", "averages", "recent_k", "recent_v", "count")
"""Tensors of a slot, beside those of blocks."""


def _check(group: LayerGroup, own: Mapping[str, Tensor], tokens: int) -> int:
    """Raises InputError where a tensor is missing, or is not what this cache would have -> blocks."""
    cache = group.cache
    count = int(own["count"]) if "count" in own and own["count"].numel() == 1 else tokens
    blocks, wanted = keep.shapes(cache, tokens, count, averages_of(group))
    types: dict[str, Any] = {}
    for name, memory in memories(group).items():
        for layer, shape in memory.layers.items():
            wanted[f"{name}.{layer}"] = list(memory.size(blocks, shape))
            types[f"{name}.{layer}"] = memory.dtype(shape)
    books = {name: x for name, x in own.items() if name.startswith("book.")}
    if wanted.keys() != own.keys() - books.keys():
        wrong = sorted(wanted.keys() ^ (own.keys() - books.keys()))[0]
        raise InputError(f"tensor {wrong!r} is not where it should be")
    for name, size in wanted.items():
        dtype = types.get(name) or _dtype(name, cache.spec.shape.dtype)
        if list(own[name].shape) != size or own[name].dtype != dtype:
            raise InputError(f"tensor {name!r} is {own[name].dtype} {list(own[name].shape)}, not {dtype} {size}")
    own_books = _library(group)
    for name, x in books.items():
        number = name.removeprefix("book.")
        if own_books is None or not number.isdecimal() or not own_books.fits(int(number), x):
            raise InputError("its keys were coded with another codebook")
    if count < 0:
        raise InputError("its numbers are out of range")
    return blocks


def _library(group: LayerGroup) -> Any:
    """Codebooks by which stored keys are known to every sequence; None where there are none."""
    found: Any = getattr(group.index, "books", None)
    return None if group.index.by_sequence else found


def _books(group: LayerGroup) -> dict[int, Tensor]:
    books = _library(group)
    found: dict[int, Tensor] = {} if books is None else books.known()
    return found


def memories(group: LayerGroup) -> dict[str, BlockMemory]:
    """Where the blocks of the cache's table lie, and what an index keeps of each."""
    table = keep.table_of(group.cache)
    if table is None:
        return {}
    side = table.memory.side
    return {"blocks": table.memory} if side is None else {"blocks": table.memory, "side": side}


def _dtype(name: str, model: torch.dtype) -> torch.dtype:
    return {"count": torch.int64, "averages": torch.float32}.get(name.split(".")[0], model)
