"""Every block of every sequence in GPU memory."""

from collections.abc import Hashable
from functools import partial

from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.layout.base import Layout
from coattn.cache.observer import Filled
from coattn.cache.snapshot import Averages, Snapshot
from coattn.cache.spec import CacheSpec
from coattn.cache.tokens import TokenMemory
from coattn.kernels.upload import upload
from coattn.types import Step, Tier
from coattn.units import ceil_div


class AllBlocks(Layout):
    """A block lies wherever there is a free one."""

    def __init__(self, block: int, spec: CacheSpec, side: BlockMemory | None, form: str = "model") -> None:
        """side: what an index keeps of every block; only then it is told which blocks are full.

        form: the model's own numbers, or tokens in fewer bits.
        """
        super().__init__(block, spec)
        kind = BlockMemory if form == "model" else TokenMemory
        self.memory = kind("gpu", spec.layers, block, spec.ledger, "Keeping every token", form, side)
        self.table: BlockTable = BlockTable(self.memory)
        self._followed = side is not None
        if form != "model":
            self.unshared = "tokens are rounded, so what is read later depends on how a prompt was cut"

    def min_bytes(self) -> int:
        spec = self.spec
        blocks = 1 + spec.padding if spec.fixed else spec.seqs * ceil_div(spec.tokens or 1, self.block)
        return blocks * (self.memory.block_bytes + self.memory.side_bytes)

    def open(self) -> None:
        spec, width = self.spec, ceil_div(self.spec.tokens or 1, self.block)
        self.table.tabulate(spec.seqs + 1, width)
        if spec.fixed:
            self.memory.fix(self._most(width) + spec.padding)
            self.table.ensure(spec.seqs, spec.padding)
        elif spec.tokens is not None:
            self.memory.reserve(self._most(width))

    def _most(self, width: int) -> int:
        """Blocks that are ever wanted, of sequences of at most `width` blocks."""
        return self.spec.seqs * width

    def plan(self, step: Step) -> None:
        self.table.grow([(slot, ceil_div(n, self.block)) for slot, n in zip(step.slots, step.lengths, strict=True)])

    def give_back(self, slot: int, history: int) -> None:
        self.table.shrink(slot, ceil_div(self.stored_tokens(slot, history), self.block))

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self.table.shrink(slot, ceil_div(keep, self.block))

    def release(self) -> None:
        self.table.release()

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.table.rows.shape[1]

    def key(self, slot: int, tokens: int) -> Hashable:
        return slot, self.table.list_version[slot]

    def block_list(self, slot: int, tokens: int) -> Tensor:
        return self.table.rows[slot]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        b, row = divmod(position, self.block)
        return self.table.owned[slot][b], row

    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.rows[slot].long()[positions // self.block], positions % self.block

    @property
    def dummy_block(self) -> int:
        return next(iter(self.table.owned.get(self.spec.seqs, ())), 0)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        super().append(layer, k, v, step)
        filled, memory = [], self.memory[layer]
        for slot, before, after in zip(step.slots, step.history, step.lengths, strict=True) if self._followed else ():
            first, last = before // self.block, after // self.block
            ids = self.table.owned[slot][first:last]
            if ids:
                places = partial(upload, ids, memory.device)
                blocks = memory[self.once(("filled", slot, before, memory.device), places)]
                own = (blocks[:, :, i].transpose(1, 2).flatten(0, 1) for i in range(2))
                filled.append(Filled(slot, first, ids, *own))
        return filled

    def take(self, slot: int, tokens: int, averages: Averages) -> Snapshot:
        return Snapshot(self.table.owned.get(slot, [])[: ceil_div(tokens, self.block)])

    def put(self, slot: int, tokens: int, snapshot: Snapshot, averages: Averages) -> int:
        self.table.share(slot, snapshot.ids)
        return 0

    def shapes(self, tokens: int, entries: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
        return ceil_div(tokens, self.block), {}

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        return {"gpu": ceil_div(tokens, self.block) * self.memory.block_bytes}

    def free_bytes(self) -> dict[Tier, int | None]:
        free = self.table.free()
        return {"gpu": None if free is None else free * self.memory.block_bytes}
