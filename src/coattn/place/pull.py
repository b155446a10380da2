"""The GPU, over arena blocks: read where they lie, or brought in through a small staging memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.attend import attend
from coattn.ops.merge import merge_states
from coattn.place.base import Call, Place, State
from coattn.place.staging import Filling, Staging
from coattn.state import AttnState
from coattn.store.base import Opening, Store
from coattn.store.step_table import StepTable
from coattn.types import BlockList, Phase, Selection


@dataclass(frozen=True)
class Piece:
    """As many of a selection's blocks as a staging half holds."""

    ids: list[int]
    """Arena block ids, in staging order."""
    picked: BlockList
    """The same blocks by their place in the half, on the host."""


@dataclass
class Pull(Place):
    """The GPU attends to far blocks over PCIe: in decode where they lie, else through a staging memory in its tier.

    The staging memory takes what the budget leaves, at most two layers' worth; a layer that does not fit goes through
    in pieces, the next piece on its way while one is attended, and the partial results are merged.
    """

    name = "pull"
    covers = "far"
    needs = frozenset({"far", "whole_blocks"})

    _stamps: Tensor | None = field(init=False, repr=False, default=None)
    """`[layers, 2, 2]` int64. On the GPU's clock: the layer's attention in GPU memory is done; so is that over PCIe.
    The second of each pair keeps the stamps on 16 bytes, so that one compiled kernel takes them all."""
    _expected: tuple[int, BlockList] | None = field(init=False, repr=False, default=None)
    _arriving: tuple[int, BlockList, Filling] | None = field(init=False, repr=False, default=None)
    _pieces: tuple[BlockList, list[Piece]] | None = field(init=False, repr=False, default=None)

    def check(self, store: Store) -> None:
        if getattr(store, "dram", "model") != "model":
            raise ConfigError(
                "dram is 'int8', but place 'pull' (method offload) takes blocks in the model's own numbers only.",
                "Leave dram out, or use method cpu, scout or hgca.",
            )

    def least(self, opening: Opening, store: Store) -> int:
        return Staging.unit_bytes(opening.layers, store.block)

    def open(self, opening: Opening, store: Store) -> None:
        super().open(opening, store)
        self.store = store
        self.staging = Staging(opening.layers, opening.ledger, store.block)
        if opening.tokens is not None:
            self.staging.reserve(opening.seqs * (opening.tokens // store.block))

    def expect(self, layer: int, picked: Selection) -> None:
        """Says what `run` will be asked next, so that it can be on its way before."""
        self._expected = None if picked.far is None else (layer, picked.far)

    def run(self, call: Call, picked: Selection) -> State:
        if picked.far is None:
            return AttnState.empty(call.q)
        if call.step.phase is Phase.DECODE:
            # one kernel reads the blocks where they lie, over PCIe: no copies to order, nothing to allocate
            stamp = None if self._stamps is None else self._stamp(call.layer, 1)
            return attend(call.q, call.store.far[call.layer], picked.far, call.scale, call.shape.softcap, stamp)
        pieces = self._cut(picked.far)
        following = [(call.layer, piece) for piece in pieces[1:]]
        if self._expected is not None:
            following.append((self._expected[0], self._cut(self._expected[1])[0]))
        arriving = self._arrived(call.layer, picked.far) or self._fill(call.layer, pieces[0])
        states = []
        for i, piece in enumerate(pieces):
            current = arriving
            if i < len(following):
                arriving = self._fill(*following[i])
            states.append(
                attend(call.q, current.wait(), _on(piece.picked, call.q.device), call.scale, call.shape.softcap)
            )
            self.staging.done(current)
        self._arriving = None if self._expected is None else (*self._expected, arriving)
        self._expected = None
        return merge_states(states)

    def prepare(self, table: StepTable) -> None:
        """The GPU's own part leaves the time of its end, which is when this one's begins."""
        device = next(iter(self.opening.layers.values())).device
        if device.type != "cuda":
            return
        if self._stamps is None:
            self._stamps = torch.zeros(len(self.opening.layers), 2, 2, dtype=torch.int64, device=device)
        for layer in self.opening.layers:
            table.stamps[layer] = self._stamp(layer, 0)

    def fetches(self) -> list[tuple[str, int, int]]:
        stamps = [] if self._stamps is None else self._stamps[..., 0].tolist()
        return [(f"layer {layer}", *pair) for layer, pair in zip(self.opening.layers, stamps, strict=False)]

    def drop_captures(self) -> None:
        self._stamps = None

    def release(self) -> None:
        self.staging.release()
        self._expected = self._arriving = self._pieces = None

    def _stamp(self, layer: int, which: int) -> Tensor:
        assert self._stamps is not None
        row = list(self.opening.layers).index(layer)
        return self._stamps[row, which, :1]

    def _fill(self, layer: int, piece: Piece) -> Filling:
        return self.staging.fill(layer, self.store.far, piece.ids)

    def _arrived(self, layer: int, picked: BlockList) -> Filling | None:
        arriving, self._arriving = self._arriving, None
        return arriving[2] if arriving and arriving[0] == layer and arriving[1] is picked else None

    def _cut(self, picked: BlockList) -> list[Piece]:
        """The selection in pieces; the same for every layer of a step, so cut once."""
        if self._pieces is None or self._pieces[0] is not picked:
            block = self.store.block
            counts = [-(-n // block) for n in picked.tokens[:, 0].tolist()]
            if self._arriving is None:
                self.staging.reserve(sum(counts))
            self._pieces = (picked, cut(picked, counts, block, self.staging.blocks))
        return self._pieces[1]


def cut(picked: BlockList, counts: list[int], block: int, most: int) -> list[Piece]:
    """A selection of `counts[i]` blocks per sequence, in pieces of at most `most` blocks."""
    flat = [(seq, i) for seq, count in enumerate(counts) for i in range(count)]
    assert picked.table.shape[1] == 1, "one list for all KV heads"
    table, tokens = picked.table[:, 0].tolist(), picked.tokens[:, 0].tolist()
    pieces = []
    for start in range(0, len(flat), most):
        part = flat[start : start + most]
        rows: list[list[int]] = [[] for _ in counts]
        held = [0] * len(counts)
        for place, (seq, i) in enumerate(part):
            rows[seq].append(place)
            held[seq] += min(block, tokens[seq] - i * block)
        width = max(map(len, rows))
        listing = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
        piece = BlockList(listing[:, None], torch.tensor(held, dtype=torch.int32)[:, None], max(held))
        pieces.append(Piece([table[seq][i] for seq, i in part], piece))
    return pieces


def _on(picked: BlockList, device: torch.device) -> BlockList:
    return BlockList(picked.table.to(device), picked.tokens.to(device), picked.longest)
