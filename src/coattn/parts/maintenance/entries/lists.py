"""Chosen entries of each layer, sequence and KV head, contiguous in DRAM: what the CPU attends to instead of all."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from coattn import native
from coattn.cache.host_memory import Growing, untouched
from coattn.cache.ledger import Ledger
from coattn.kernels.quantise.blocks import Layout, PackedBlocks
from coattn.types import LayerShape
from coattn.units import ceil_div

GROWTH_BYTES = 8 << 20
"""Bytes that the memory grows by at a time, at least, where there is room: touching new pages takes 4 ms."""
AHEAD = 8
"""Once a prompt has been read, the memory becomes larger than its entries by one part in so many."""
CHUNK_BYTES = 2 << 20
"""Bytes that the memory grows by after a step that has left little of it: a huge page."""


def spares(packed: bool) -> int:
    """Blocks that a list may need for what it gets of one block; in 8 bits its last one may have to be written anew."""
    return 2 if packed else 1


NO_BLOCKS = torch.empty(0, dtype=torch.int64)


@dataclass
class PendingAppend:
    """Rows on their way to their lists."""

    lists: EntryLists
    pending: native.Pending[native.Kept] | None = None
    which: Tensor = NO_BLOCKS
    """`[n]` lists."""
    spare: Tensor = NO_BLOCKS
    """Blocks that were set aside for them, one each."""
    other: Tensor = NO_BLOCKS
    """And one more each, where the lists are in 8 bits."""

    def finish(self) -> None:
        """Waits for the pool, the first time, and gives back the blocks that it did not need.

        Nobody reads meanwhile.
        """
        if self.pending is None:
            return
        kept = self.pending.wait()
        assert kept is not None
        self.pending = None
        self.lists.give_back(self.spare[kept.used == 0])
        if len(self.other):
            self.lists.replace(self.which, kept.moved.long(), self.other)


class EntryLists:
    """Lists of single entries in blocks of one KV head each, shared by all layers, slots and heads.

    Owner: maintenance. Writers: maintenance between steps, and the worker pool (`keep`). Readers: the CPU's workers
    during a step, of what `shown` says. `keep` writes only past what is shown, so both may happen at once; what
    it wrote is shown between steps, once `finish` has seen it done.

    In 8 bits the keys of a block share a scale in each channel. A last block whose scales do not hold a new entry is
    written anew, by `keep` in another block, which takes its place in `finish`: nothing is clipped, and what a step
    attends to does not depend on when the pool writes.
    """

    def __init__(
        self,
        shape: LayerShape,
        layers: int,
        slots: int,
        block: int,
        width: int,
        most: int,
        ledger: Ledger,
        fixed: bool,
        packed: bool = False,
    ) -> None:
        """width: blocks of the longest list, at first; most: bytes that the entries may ever take.

        fixed: lists never become longer than `width`, and nothing that is read by address ever moves. packed: entries
        are in 8 bits, and so are the blocks that they come from.
        """
        self.shape, self.block, self.ledger, self.packed = shape, block, ledger, packed
        self.row_bytes = shape.head_dim * (1 if packed else shape.dtype.itemsize)
        self.block_bytes = Layout(block, shape.head_dim).bytes if packed else 2 * block * self.row_bytes
        self.spares = spares(packed)
        lists = (layers, slots, shape.kv_heads)
        self.table = untouched((*lists, width), torch.int32)
        self.stored = torch.zeros(*lists, dtype=torch.int32)
        """Entries of each list."""
        self.shown = torch.zeros(*lists, dtype=torch.int32)
        """Entries of each list that are attended: a prefix of what is stored."""
        self._memory = Growing(most + self.block_bytes)
        self.capacity = self._memory.most // self.block_bytes
        self._whole = self._memory.memory[: self.capacity * self.block_bytes]
        known = self.capacity if fixed else 0
        self._position = untouched((known, block), torch.int32)
        self._weight = untouched((known, block))
        self.fixed = fixed
        self._free: list[int] = []
        """Blocks that lists have given back; what came last goes first."""
        self._next = 0
        """Blocks from here on have never been anybody's."""
        self._have = 0
        """Blocks that there is memory for."""
        self._lock = threading.RLock()
        """Of the blocks that nobody has: two threads may add to different lists at once."""

    @property
    def blocks(self) -> Tensor | PackedBlocks:
        """`[capacity, kv_heads, 2, block, head_dim]`, or in 8 bits; the same block for every head."""
        heads, d = self.shape.kv_heads, self.shape.head_dim
        if self.packed:
            memory = self._whole.view(self.capacity, 1, self.block_bytes).expand(-1, heads, -1)
            return PackedBlocks(memory, self.block, d)
        return self._whole.view(self.shape.dtype).view(self.capacity, 1, 2, self.block, d).expand(-1, heads, -1, -1, -1)

    def used_bytes(self) -> int:
        return (self._next - len(self._free)) * self.block_bytes

    def fill(
        self,
        layer: int,
        slot: int,
        head: int,
        position: Tensor,
        weight: Tensor,
        ids: Tensor,
        source: int,
        stride: int,
        rest: float = 0.0,
        stop: Tensor | None = None,
        alone: bool = True,
    ) -> int:
        """Adds entries to the end of one list, not shown yet, while steps of others may run.

        position: `[n]` int32, in order; weight: `[n]` float32. ids: `[blocks]` int32 of the sequence; source, stride:
        where block 0 of its KV head lies in DRAM, and the bytes between two blocks. rest: after each piece, by the time
        that it took. stop: `[1]` int32, set by who wants no more. alone: without the pool, and new pages come as they
        are written, each in its piece; else all at once -> how many were added.
        """
        before, (_, slots, heads) = int(self.stored[layer, slot, head]), self.stored.shape
        self._widen(before + len(position))
        need = ceil_div(before + len(position), self.block) - ceil_div(before, self.block)
        fresh, which = self._take(need, alone).to(torch.int32), (layer * slots + slot) * heads + head
        # whole blocks at a time: in 8 bits the entries of a block share their scales, wherever it was cut
        blocks = self.blocks_of_piece() if alone else max(1, ceil_div(len(position), self.block))
        pace = native.Pace(blocks * self.block, rest, stop, alone)
        added = native.fill_rows(self._lists(), which, position, weight, ids, source, stride, fresh, pace)
        self.give_back(fresh[ceil_div(before + added, self.block) - ceil_div(before, self.block) :].long())
        return added

    def blocks_of_piece(self) -> int:
        """Blocks that are written, or taken, at a time while others must not wait."""
        return max(1, CHUNK_BYTES // self.block_bytes)

    def keep(self, slot: int, first: int, kept: Tensor, weights: Tensor, source: Tensor) -> PendingAppend:
        """Adds the kept rows `[layers, kv_heads, block]` of one block to a slot's lists; the pool does it meanwhile.

        first: position of the block's first row. source: addresses of the block, one for each layer and KV head.
        """
        layers, slots, heads = self.stored.shape
        which = ((torch.arange(layers)[:, None] * slots + slot) * heads + torch.arange(heads)).flatten()
        self._widen(int(self.stored[:, slot].max()) + self.block)
        spare = self._take(self.spares * len(which)).view(self.spares, -1)
        other = spare[1] if self.packed else None
        call = native.plan_keep_rows(
            self._lists(),
            which,
            kept.reshape(-1, self.block).to(torch.uint8),
            weights.reshape(-1, self.block).contiguous(),
            source.flatten(),
            torch.full((len(which),), first, dtype=torch.int32),
            spare[0].to(torch.int32),
            None if other is None else other.to(torch.int32),
        )
        return PendingAppend(self, call.submit(), which, spare[0], NO_BLOCKS if other is None else other)

    def replace(self, lists: Tensor, columns: Tensor, blocks: Tensor) -> None:
        """Blocks take the place of those in these columns of lists; where it is -1, of none. Frees who has no place."""
        place = columns >= 0
        rows, columns = lists[place], columns[place]
        table = self.table.view(-1, self.table.shape[-1])
        gone = table[rows, columns].long()
        table[rows, columns] = blocks[place].to(torch.int32)
        self.give_back(torch.cat([gone, blocks[~place]]))

    def give_back(self, blocks: Tensor) -> None:
        """Blocks that no list owns may be taken again."""
        with self._lock:
            self._free += blocks.tolist()

    def show(self, slots: list[int]) -> None:
        """From now on all that is stored of these slots is attended."""
        self.shown[:, slots] = self.stored[:, slots]

    def spare(self) -> int:
        """Blocks that lists could still be given."""
        with self._lock:
            return self._limit() - self._next + len(self._free)

    def reserve(self, blocks: int) -> None:
        """Takes memory for so many blocks more than lists have, at once and with the pool."""
        with self._lock:
            self._grow(self._next + max(0, blocks - len(self._free)))

    def make_room(self) -> None:
        """Takes memory for what is to come now rather than in the middle of it, where the budget has it."""
        with self._lock:
            layers, slots, heads = self.stored.shape
            ahead = max(self._next // AHEAD, self.spares * layers * (slots - 1) * heads)
            self._grow(min(self._next + ahead, self._limit()))

    def top_up(self) -> None:
        """Takes a little more memory if the next blocks that leave the window might not find enough of it.

        Called after every step, so that no step has to take much.
        """
        with self._lock:
            layers, _, heads = self.stored.shape
            spare, piece = self._have - self._next + len(self._free), self.blocks_of_piece()
            wanted = min(self._have + piece, self.capacity)
            if self._have and spare < 2 * self.spares * layers * heads and wanted <= self._limit():
                self._grow(wanted, piece)

    def cut(self, slots: list[int], end: int = 0) -> None:
        """Forgets the entries of these slots from position `end` on; lists are in the order of position."""
        for slot in slots:
            keep = torch.zeros_like(self.stored[:, slot])
            if end:
                keep = self._before(slot, end)
            first, last = self._blocks_of(keep).tolist(), self._blocks_of(self.stored[:, slot]).tolist()
            # layer by layer: small enough that PyTorch shares none of it among threads
            for rows, begins, ends in zip(self.table[:, slot], first, last, strict=True):
                if begins != ends:
                    gone = [row[a:b] for row, a, b in zip(rows, begins, ends, strict=True)]
                    self.give_back(torch.cat(gone).long())
            self.stored[:, slot] = keep
            self.shown[:, slot] = keep

    def hide(self, slot: int, end: int) -> None:
        """Of a slot only entries before position `end` are attended from now on; the others stay stored."""
        self.shown[:, slot] = self._before(slot, end) if end else 0

    def of_block(self, layer: int, slot: int, head: int, b: int) -> tuple[Tensor, Tensor]:
        """The rows of a sequence's block b that are in a list, and what they weighed when they were chosen."""
        rows = self.positions(layer, slot, head).long() - b * self.block
        own = (rows >= 0) & (rows < self.block)
        return rows[own], self._entries(self._weight, layer, slot, head)[own]

    def positions(self, layer: int, slot: int, head: int) -> Tensor:
        return self._entries(self._position, layer, slot, head)

    def release(self) -> None:
        self.ledger.give("host", self._have * self.block_bytes)
        self._have = 0

    def _entries(self, what: Tensor, layer: int, slot: int, head: int) -> Tensor:
        count = int(self.stored[layer, slot, head])
        ids = self.table[layer, slot, head, : ceil_div(count, self.block)].long()
        return what[ids].flatten()[:count]

    def _before(self, slot: int, end: int) -> Tensor:
        """`[layers, kv_heads]` int32: entries of each list with a position before `end`."""
        count = self.stored[:, slot].long()
        width = int(self._blocks_of(count).max())
        inside = torch.arange(width * self.block) < count[..., None]
        ids = torch.where(inside[..., :: self.block], self.table[:, slot, :, :width].long(), 0)
        position = self._position[ids].flatten(2) if len(self._position) else torch.zeros_like(inside)
        return ((position < end) & inside).sum(-1).to(torch.int32)

    def _take(self, count: int, alone: bool = False) -> Tensor:
        """Ids of `count` blocks, from now on somebody's."""
        with self._lock:
            left = max(0, len(self._free) - count)
            fresh = count - (len(self._free) - left)
            self._grow(self._next + fresh, self.blocks_of_piece() if alone else 0, alone, touched=not alone)
            ids = torch.tensor([*self._free[left:], *range(self._next, self._next + fresh)], dtype=torch.int64)
            del self._free[left:]
            self._next += fresh
            return ids

    def _limit(self) -> int:
        """Blocks that there can ever be memory for, as far as the budget has it now."""
        room = self.ledger.room("host")
        return self.capacity if room is None else min(self.capacity, self._have + room // self.block_bytes)

    def _grow(self, blocks: int, least: int = 0, alone: bool = False, touched: bool = True) -> None:
        """least: blocks to grow by if it grows; otherwise as many as GROWTH_BYTES holds. alone: without the pool.

        Not touched: pages come as they are written to.
        """
        what = "Keeping the entries that matter"
        if blocks > self.capacity:
            self.ledger.refuse("host", (blocks - self._next) * self.block_bytes, what)
        if blocks <= self._have:
            return
        generous = self._have + (least or GROWTH_BYTES // self.block_bytes)
        more = max(blocks, min(generous, self._limit())) - self._have
        self.ledger.take("host", more * self.block_bytes, what)
        self._have += more
        self._memory.grow(self._have * self.block_bytes, alone, touched)
        if self.fixed:
            return
        self._position = torch.cat([self._position, torch.zeros(more, self.block, dtype=torch.int32)])
        self._weight = torch.cat([self._weight, torch.zeros(more, self.block)])

    def _widen(self, entries: int) -> None:
        """Only where sequences may become longer than was said at first."""
        need = ceil_div(entries, self.block)
        if need > self.table.shape[-1]:
            more = torch.zeros(*self.table.shape[:-1], need, dtype=torch.int32)
            more[..., : self.table.shape[-1]] = self.table
            self.table = torch.cat([more, torch.zeros_like(more)], -1)

    def _lists(self) -> native.Lists:
        return native.Lists(
            self.table.view(-1, self.table.shape[-1]),
            self.stored.view(-1),
            self._memory.memory.data_ptr(),
            self.block,
            self.row_bytes,
            self._position,
            self._weight,
            self.shape.head_dim if self.packed else 0,
        )

    def _blocks_of(self, entries: Tensor) -> Tensor:
        return -(-entries.long() // self.block)
