"""What a layout is: index arithmetic over a block memory, and what a sequence has outside its slot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.observer import Filled
from coattn.cache.snapshot import Averages, Snapshot
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import TableMemory
from coattn.kernels.append import append, write_rows
from coattn.kernels.upload import upload
from coattn.types import Step, Tier

T = TypeVar("T")
DEFAULT_WINDOW_TOKENS = 1024
"""Where neither a parameter nor a budget says how many."""


class DenseHistory(NamedTuple):
    """Stored tokens that must be attended position by position: k, v `[tokens, kv_heads, head_dim]`, oldest first."""

    k: Tensor
    v: Tensor
    sinks: int = 0
    """The first so many are always visible."""
    window: int | None = None
    """Tokens that a query looks back, itself included; None for all."""
    position: int | None = None
    """Of the token after them, in the text, where positions count inside the cache."""


class Layout(ABC):
    """Block ids, rows and lists of sequences. A token has a position; block b holds positions `b * block` and on.

    A slot is the number, `0 .. seqs - 1`, by which a cache knows a running sequence.
    """

    memory: BlockMemory
    width: int
    """Blocks of the longest list."""
    sinks: int = 0
    """First blocks of a sequence that stay whatever comes."""
    numbered: bool = False
    """Whether a step table says the position of each new token in its text."""
    table: BlockTable | None = None
    """Where every block of a sequence is listed; None where no block is kept for good."""
    unshared: str | None = None
    """Why a block's numbers are not the same for every text that begins like this; None where they are."""

    def __init__(self, block: int, spec: CacheSpec) -> None:
        self.block, self.spec = block, spec
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, which is the same for every layer of a step: made once, until the step is over."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def end_step(self) -> None:
        """What was made once is made anew in the next step."""
        self._made.clear()

    @abstractmethod
    def min_bytes(self) -> int:
        """Bytes of the GPU tier without which a cache cannot work for what its spec says is to come."""

    @abstractmethod
    def open(self) -> None:
        """Takes memory."""

    def plan(self, step: Step) -> None:  # noqa: B027
        """Makes room for a step's tokens. Raises BudgetError and changes nothing."""

    def commit(self, step: Step) -> None:  # noqa: B027
        """The step's tokens are history now."""

    def give_back(self, slot: int, history: int) -> None:  # noqa: B027
        """A step did not happen: what was planned for it beyond a sequence's history is free again."""

    @abstractmethod
    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        self.memory.release()

    # where tokens lie

    def stored_tokens(self, slot: int, history: int) -> int:
        """Positions that were written so far, of a sequence with so many tokens of history."""
        return history

    def first(self, tokens: int) -> int:
        """The oldest block after the sinks that is attended here, of a sequence of so many tokens."""
        return 0

    def entries(self, slot: int, tokens: int) -> int:
        """Tokens attended here, of a sequence of so many."""
        return tokens

    def pool(self, slot: int) -> range:
        """Ids of full blocks of a pool that a step table lists; those that `recall` fills are listed by the rule."""
        return range(0)

    def pool_entries(self, slot: int) -> float:
        """Tokens of pools that decode steps attend to, as many as their bytes are of whole tokens."""
        return float(len(self.pool(slot)) * self.block)

    @abstractmethod
    def key(self, slot: int, tokens: int) -> Hashable:
        """Two equal keys mean the same list of blocks."""

    @abstractmethod
    def block_list(self, slot: int, tokens: int) -> Tensor:
        """int32 ids of the blocks attended here, in order; what comes after the last is ignored."""

    @abstractmethod
    def place(self, slot: int, position: int) -> tuple[int, int]:
        """Block and row of the token at a position."""

    @abstractmethod
    def places(self, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same of many: int64 `[n]` each."""

    def places_on(self, device: torch.device, slot: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`places` where a layer's kernels read them."""
        ids, rows = self.places(slot, positions)
        return upload(ids, device), upload(rows, device)

    def kept(self, slot: int, start: int, end: int) -> Tensor:
        """Of the positions `start .. end` that are written at once, those that stay here."""
        return torch.arange(start, end)

    @property
    def dummy_block(self) -> int:
        """The block that padding rows write to."""
        return 0

    # steps

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        """Stores packed k, v `[tokens, kv_heads, head_dim]` of a planned step that is no decode step.

        -> the blocks that have become full, where the index follows them.
        """
        source, ids, rows = self.once(("places", k.device), lambda: self._written(step, k.device))
        if len(source) == len(k):
            write_rows(self.memory.rows(layer), ids, rows, k, v)
        elif len(source):
            write_rows(self.memory.rows(layer), ids, rows, k[source], v[source])
        return []

    def append_rows(self, layer: int, k: Tensor, v: Tensor, tables: TableMemory) -> None:
        """Stores one token for each row of a decode step's table. Tensors only."""
        block, offset = (tables.device_rows(name, len(k)) for name in ("write_block", "write_offset"))
        append(self.memory.rows(layer), block, offset, k, v)

    def history(self, layer: int, slot: int, length: int) -> DenseHistory | None:
        """What is stored of a sequence, where it must be attended position by position; None where it is a set."""
        return None

    def midway(self, slot: int) -> bool:
        """Whether a sequence is in the middle of a prompt of which more is known than its blocks say."""
        return False

    def overwrites(self, slot: int, history: int, new: int) -> bool:
        """Whether so many new tokens at once take the places of some that a sequence has."""
        return False

    def goes_back(self, slot: int) -> bool:
        """Whether a sequence can lose its last tokens: what they came after was not overwritten by them."""
        return True

    # a sequence outside its slot

    @abstractmethod
    def take(self, slot: int, tokens: int, averages: Averages) -> Snapshot:
        """What a sequence of so many tokens is. Its blocks are still the slot's, and not held yet."""

    @abstractmethod
    def put(self, slot: int, tokens: int, snapshot: Snapshot, averages: Averages) -> int:
        """An empty slot goes on with a sequence -> bytes that its window got."""

    @abstractmethod
    def shapes(self, tokens: int, entries: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
        """Of a sequence of so many tokens: how many blocks `take` finds, and the shape of each tensor.

        entries: written so far, of a cache that keeps the recent ones.
        """

    def snapshot_goes_back(self, snapshot: Snapshot) -> bool:
        """Whether a sequence that was taken can lose its last tokens and be as if they had never come."""
        return True

    # bytes

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        return {}

    def free_bytes(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given of it; None: no limit."""
        return {}

    def _written(self, step: Step, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Which packed tokens stay in GPU memory, and the block and row of each."""
        sources, ids, rows = [], [], []
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            base = self.stored_tokens(slot, history)
            kept = self.kept(slot, base, base + end - start)
            address = self.places(slot, kept)
            sources.append(kept - base + start)
            ids.append(address[0])
            rows.append(address[1])
        source, block, row = (upload(torch.cat(x), device) for x in (sources, ids, rows))
        return source, block, row
