"""A parked sequence, which is in no slot; its contents as tensors with names, and back; and into a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.snapshot import Snapshot, blank_unused
from coattn.engine.store.blocks import PrefixNode, StoredBlocks
from coattn.errors import InputError
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import Step

ParkKey = tuple[str, int | None]
"""`("session", number)`; `("request", id)`; `("before", session)`: what it had before the turn that runs."""


@dataclass(eq=False)
class ParkedSequence:
    """A session between turns, or a request that lost its slot. It goes on after its tokens."""

    tokens: list[int]
    shareable_tokens: int
    """The first so many were read, none of them after one that a lossy step had stored."""
    groups: list[Snapshot]
    nodes: list[PrefixNode] = field(default_factory=list)
    """Of its first blocks."""
    moved: dict[str, Tensor] = field(default_factory=dict)
    """Its contents in DRAM, once its blocks were given away; then `groups` has none."""
    file: str = ""
    """Or the name of the file that has them."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Of layers with a state, after the last of the tokens, in DRAM."""
    holds: bool = False
    """Whether these are one of the states that may be kept."""

    @property
    def in_place(self) -> bool:
        """Whether its blocks are its own still."""
        return not self.moved and not self.file

    @property
    def ids(self) -> list[list[int]]:
        """Its blocks in each group's table."""
        return [kept.ids for kept in self.groups]


def pack(runtime: Runtime, blocks: StoredBlocks, parked: ParkedSequence) -> dict[str, Tensor]:
    """Everything of a sequence, on the host: `0.window.3` is what group 0 has in the window of layer 3."""
    states = {f"{STATE}{name}": x for name, x in parked.states.items()}
    if parked.moved:
        return parked.moved | states
    found = blocks.read(parked.ids)
    for g, (group, kept) in enumerate(zip(runtime.groups, parked.groups, strict=True)):
        if len(kept.ids) * group.cache.block > len(parked.tokens):  # the last block is not full
            for name in [name for name in found if name.startswith(f"{g}.")]:
                if name.startswith(f"{g}.blocks."):
                    found[name] = blank_unused(found[name], len(parked.tokens), group.cache.block)
                else:
                    found[name][-1] = 0  # written anew when the block is full
        found |= {f"{g}.{name}": x for name, x in kept.tensors.items()}
        books = _shared_books(group)
        known = {} if books is None else books.known()
        found |= {f"{g}.book.{layer}": x.to("cpu", copy=True) for layer, x in known.items()}
    return found | states


def unpack(
    runtime: Runtime, blocks: StoredBlocks, tensors: Mapping[str, Tensor], tokens: list[int], shareable_tokens: int
) -> ParkedSequence:
    """Checks every tensor, then takes blocks and stores. If it raises InputError, BudgetError or whatever storing
    fails with, it holds no block."""
    own = [
        {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{g}.")}
        for g in range(len(runtime.groups))
    ]
    states = {name.removeprefix(STATE): x for name, x in tensors.items() if name.startswith(STATE)}
    if states.keys() != ({} if runtime.states is None else runtime.states.tensors).keys():
        raise InputError("its layers have other states")
    tensors = {name: x for name, x in tensors.items() if not name.startswith(STATE)}
    rest = set(tensors) - {f"{g}.{name}" for g, each in enumerate(own) for name in each}
    if rest:
        raise InputError(f"it holds {sorted(rest)[0]!r}, which this model has not")
    wanted: dict[str, tuple[list[int], torch.dtype]] = {}
    counts = []
    for g, (group, each) in enumerate(zip(runtime.groups, own, strict=True)):
        count = int(each["count"]) if "count" in each and each["count"].numel() == 1 else len(tokens)
        if count < 0:
            raise InputError("its numbers are out of range")
        number, shapes = group.cache.gpu.shapes(len(tokens), count, averages_of(group))
        counts.append(number)
        model = group.cache.spec.shape.dtype
        wanted |= {f"{g}.{name}": (size, SLOT_DTYPES.get(name.split(".")[0], model)) for name, size in shapes.items()}
    _check(tensors, wanted | blocks.expected(counts))
    for group, each in zip(runtime.groups, own, strict=True):
        _check_books(group, each)
    ids = blocks.write(tensors, counts)
    try:
        for group, each in zip(runtime.groups, own, strict=True):
            for name, x in each.items():
                if name.startswith("book."):
                    _shared_books(group).adopt(int(name.removeprefix("book.")), x)
    except BaseException:
        blocks.drop(ids)
        raise
    slot_only = [{name: x for name, x in each.items() if name.split(".")[0] in SLOT_TENSORS} for each in own]
    groups = [Snapshot(i, x) for i, x in zip(ids, slot_only, strict=True)]
    return ParkedSequence(tokens, shareable_tokens, groups, states=states)


def fill(runtime: Runtime, slot: int, tokens: int, kept: Sequence[Snapshot]) -> int:
    """A slot gets what was kept of a sequence; `announce` follows -> the bytes that were copied."""
    pairs = zip(runtime.groups, kept, strict=True)
    return sum(group.cache.gpu.put(slot, tokens, own, averages_of(group)) for group, own in pairs)


def announce(runtime: Runtime, slot: int, tokens: int, step: Step) -> None:
    """Tells maintenance and index of a sequence that they have not seen growing. step: what it looks like to them."""
    for group in runtime.groups:
        group.maintenance.plan(step)
        group.index.truncate(slot, tokens)


def averages_of(group: LayerGroup) -> dict[int, Any]:
    """By layer: what its index keeps up for every entry of the GPU's blocks."""
    found = {layer: group.index.observed(layer) for layer in group.cache.spec.layers}
    return {layer: average.values for layer, average in found.items() if average is not None}


STATE = "state."
"""How the names of states begin."""
SLOT_TENSORS = ("window", "averages", "recent_k", "recent_v", "count")
"""What a slot has besides blocks."""
SLOT_DTYPES = {"count": torch.int64, "averages": torch.float32}
"""Of those that are not of the model's type."""


def _check(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[list[int], torch.dtype]]) -> None:
    """Raises InputError where a tensor is missing, or is not what this cache would have."""
    names = {name for name in tensors if name.split(".")[1] != "book"}
    if wanted.keys() != names:
        raise InputError(f"tensor {sorted(wanted.keys() ^ names)[0]!r} is not where it should be")
    for name, (size, dtype) in wanted.items():
        x = tensors[name]
        if list(x.shape) != size or x.dtype != dtype:
            raise InputError(f"tensor {name!r} is {x.dtype} {list(x.shape)}, not {dtype} {size}")


def _check_books(group: LayerGroup, own: Mapping[str, Tensor]) -> None:
    books = _shared_books(group)
    for name, x in own.items():
        if name.startswith("book."):
            number = name.removeprefix("book.")
            if books is None or not number.isdecimal() or not books.fits(int(number), x):
                raise InputError("its keys were coded with another codebook")


def _shared_books(group: LayerGroup) -> Any:
    """Codebooks by which stored keys are known to every sequence; None where there are none."""
    return None if group.index.by_sequence else getattr(group.index, "books", None)
