"""The GPU, over blocks in DRAM: read where they lie, or brought in through a small staging memory."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.kernels.attend import attend
from coattn.kernels.merge import merge_states
from coattn.kernels.upload import upload
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, State
from coattn.parts.executor.staging import Filling, Staging
from coattn.types import BlockList, BlockWork, Work
from coattn.units import ceil_div


class Piece(NamedTuple):
    """As many of a selection's blocks as a staging half holds."""

    ids: list[int]
    """Ids of blocks in DRAM, in staging order."""
    picked: BlockList
    """The same blocks by their place in the half, on the layers' device."""


@dataclass
class Pull(Executor):
    """The GPU attends to blocks in DRAM over PCIe: in decode where they lie, else through a staging memory in its tier.

    The staging memory takes what the budget leaves, at most two layers' worth; a layer that does not fit goes through
    in pieces, the next piece on its way while one is attended, and the partial results are merged.
    """

    name = "pull"
    runs = frozenset({"host"})
    unpacked_only = frozenset({"host"})
    provides = frozenset({"pull"})

    _arriving: tuple[int, BlockList, Filling] | None = field(init=False, repr=False, default=None)
    _pieces: tuple[BlockList, list[Piece]] | None = field(init=False, repr=False, default=None)

    def min_gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        return Staging.unit_bytes(spec.layers, config.block) if config.host else 0

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        if cache.host is None:
            return
        self.staging = Staging(cache.spec.layers, cache.spec.ledger, cache.block)
        if cache.spec.tokens is not None:
            # sequences are read one after another
            self.staging.reserve(cache.spec.tokens // cache.block)

    def run(self, call: AttentionCall, work: BlockWork) -> State:
        if call.table is None:
            return self.read(call, work, None)
        # one kernel reads the blocks where they lie, over PCIe: no copies to order, nothing to allocate
        stamp, cap = call.table.bridge.timestamp_slot(call.layer, "pull"), call.shape.softcap
        listed, whole = work.blocks, self.cache.dram.memory[call.layer]
        memory = listed.memory if isinstance(listed.memory, Tensor) else whole
        return attend(call.q, memory, listed, call.scale, cap, stamp)

    def read(self, call: AttentionCall, work: Work, following: int | None) -> State:
        assert isinstance(work, BlockWork)
        assert self.staging is not None, "there is a DRAM tier"
        listed = work.blocks
        pieces = self._cut(listed)
        wanted = [(call.layer, piece) for piece in pieces[1:]]
        if following is not None:
            wanted.append((following, pieces[0]))
        arriving = self._arrived(call.layer, listed) or self._fill(call.layer, pieces[0])
        states = []
        for i, piece in enumerate(pieces):
            current = arriving
            if i < len(wanted):
                arriving = self._fill(*wanted[i])
            states.append(attend(call.q, current.wait(), piece.picked, call.scale, call.shape.softcap))
            self.staging.done(current)
        self._arriving = None if following is None else (following, listed, arriving)
        return merge_states(states)

    def release(self) -> None:
        if self.staging is not None:
            self.staging.release()
        self._arriving = self._pieces = None

    def _fill(self, layer: int, piece: Piece) -> Filling:
        assert self.staging is not None
        return self.staging.fill(layer, self.cache.dram.memory, piece.ids)

    def _arrived(self, layer: int, picked: BlockList) -> Filling | None:
        arriving, self._arriving = self._arriving, None
        return arriving[2] if arriving and arriving[0] == layer and arriving[1] is picked else None

    def _cut(self, picked: BlockList) -> list[Piece]:
        """The selection in pieces; the same for every layer of a step, so cut once."""
        if self._pieces is None or self._pieces[0] is not picked:
            assert self.staging is not None
            block = self.cache.block
            if self._arriving is None:
                self.staging.reserve(ceil_div(int(picked.tokens), block))
            self._pieces = (picked, cut(picked, block, self.staging.blocks, self.cache.spec.device))
        return self._pieces[1]


def cut(picked: BlockList, block: int, most: int, device: torch.device) -> list[Piece]:
    """What one sequence selects, in pieces of at most `most` blocks; lists of them on a device."""
    ids, tokens, pieces = picked.table.flatten().tolist(), int(picked.tokens), []
    for start in range(0, ceil_div(tokens, block), most):
        held = min(tokens - start * block, most * block)
        places = torch.arange(ceil_div(held, block), dtype=torch.int32)
        listing, count = (upload(x, device)[None, None] for x in (places, torch.tensor(held, dtype=torch.int32)))
        pieces.append(Piece(ids[start : start + len(places)], BlockList(listing, count, held)))
    return pieces
