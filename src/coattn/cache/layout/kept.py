"""Every token of a prompt while it is read, then what maintenance keeps."""

from collections import Counter

from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.layout.all_blocks import AllBlocks
from coattn.cache.spec import CacheSpec
from coattn.types import Step
from coattn.units import ceil_div


class KeptTokens(AllBlocks):
    """Entries of a sequence in a row: of a prompt all, later what maintenance keeps; what is dropped frees blocks.

    A place says nothing of a position in the text: each KV head may have another token there.
    """

    numbered = True

    def __init__(self, block: int, spec: CacheSpec, side: BlockMemory | None) -> None:
        super().__init__(block, spec, side)
        self._followed = False  # entries move: maintenance tells the index itself
        self._count: Counter[int] = Counter()

    def _most(self, width: int) -> int:
        """One prompt is read while the other sequences have only what stays."""
        kept = self.spec.plan.kept_entries
        stay = ceil_div(kept, self.block) if kept else width
        return min(self.spec.seqs * width, self.spec.seqs * stay + width)

    @property
    def width(self) -> int:  # type: ignore[override]
        wide = self.table.rows.shape[1]
        return min(wide, ceil_div(self.spec.plan.kept_entries, self.block)) if self.spec.fixed else wide

    def plan(self, step: Step) -> None:
        for slot, history in zip(step.slots, step.history, strict=True):
            if not history:
                self.shrink(slot, 0)
        wanted = [(s, ceil_div(self.count(s) + n, self.block)) for s, n in zip(step.slots, step.new, strict=True)]
        self.table.grow(wanted)

    def count(self, slot: int) -> int:
        """Entries that are there."""
        return self._count[slot]

    def stored_tokens(self, slot: int, history: int) -> int:
        return self.count(slot)

    def block_list(self, slot: int, tokens: int) -> Tensor:
        return self.table.rows[slot, : max(self.width, ceil_div(tokens, self.block))]

    def commit(self, step: Step) -> None:
        self._count.update(dict(zip(step.slots, step.new, strict=True)))

    def crop(self, slot: int, keep: int) -> None:
        """The first entries count; blocks stay."""
        self._count[slot] = min(self.count(slot), keep)

    def shrink(self, slot: int, keep: int) -> None:
        """Only the first entries stay, and their blocks."""
        self.crop(slot, keep)
        self.table.shrink(slot, ceil_div(self.count(slot), self.block))

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self.shrink(slot, keep)

    def release(self) -> None:
        self._count.clear()
        super().release()
