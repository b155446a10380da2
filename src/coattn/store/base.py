"""What a store is: it keeps keys and values, and says where they lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from coattn.ops.average import Average
from coattn.part import Part
from coattn.store.blocks import BlockMemory
from coattn.store.ledger import Ledger, Tier
from coattn.store.step_table import StepTable, TableMemory
from coattn.types import BlockList, LayerShape, Phase, Selection, Step

T = TypeVar("T")


@dataclass(frozen=True)
class Opening:
    """What a store is opened with: the layers it serves, the budget, and how much is to come."""

    layers: Mapping[int, LayerShape]
    ledger: Ledger
    seqs: int
    """Sequences the store serves at a time; slots are `0 .. seqs - 1`."""
    tokens: int | None
    """The longest a sequence will get, where that is known; lets a store refuse early and allocate once."""
    fixed: bool = False
    """Take what the budgets allow now, at most `seqs` sequences of `tokens`, and never move it; `tokens` is known."""
    spare: int = 0
    """Near blocks beside those of the sequences, for the padding rows of a captured step: 1 or none."""

    def block_bytes(self, block: int) -> int:
        """Bytes of one block of every layer."""
        return block * sum(shape.token_bytes for shape in self.layers.values())


@dataclass(frozen=True)
class Run:
    """A window's history, oldest first: k, v `[tokens, kv_heads, head_dim]`, the first `sinks` always visible."""

    k: Tensor
    v: Tensor
    sinks: int
    window: int | None
    """Tokens that a query looks back, itself included; None for all."""


class Listing(NamedTuple):
    """Block ids and token counts of each sequence, on the host."""

    ids: list[list[int]]
    tokens: list[int]


@dataclass
class Store(Part):
    """Keeps the KV of a group of layers.

    Life: `open` once; then per step `plan` (host decisions and allocation; refuses without changing anything),
    `append` per layer, `commit`. Parameters are the dataclass's own fields.
    """

    axis: ClassVar[str] = "store"
    keeps_all: ClassVar[bool]
    """Whether every token stays reachable: the store's half of an exact method."""
    recordable = True
    """Whether a decode step over it can be captured in a CUDA graph."""

    block: int
    """Tokens per block."""
    opening: Opening = field(init=False, repr=False)
    step_table: StepTable = field(init=False, repr=False)
    """Of the running decode step; the runtime sets it."""
    _cache: dict[object, object] = field(init=False, repr=False, default_factory=dict)

    def is_exact(self) -> bool:
        """Whether nothing is lost with the parameters it has, so that a rule that leaves nothing out is exact."""
        return type(self).keeps_all

    def uncaptured(self) -> str | None:
        """Why a decode step over this store cannot be captured in a CUDA graph, or None."""
        return None if self.recordable else "its class does not say `recordable = True`"

    @abstractmethod
    def least(self, opening: Opening) -> int:
        """Bytes of the GPU tier without which the store cannot work for what `opening` says is to come."""

    @abstractmethod
    def open(self, opening: Opening) -> None:
        """Allocates what is fixed. Raises BudgetError naming the minimum."""

    @abstractmethod
    def plan(self, step: Step) -> None:
        """Makes room for the step's tokens. Raises BudgetError and leaves the store as it was."""

    @abstractmethod
    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Stores packed k, v `[tokens, kv_heads, head_dim]` of a planned step."""

    @abstractmethod
    def listing(self, step: Step) -> tuple[Listing | None, Listing | None]:
        """All the step's queries may see, near and far: in decode with the step's own token, else the history."""

    def commit(self, step: Step) -> None:
        """The step is over: its tokens are history now."""
        self._cache.clear()

    def run(self, layer: int, slot: int, step: Step) -> Run | None:
        """History that must be attended position by position (windows), or None where it is a set."""
        return None

    def notice(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        """Hears the packed queries `[tokens, q_heads, head_dim]` of a step that is no decode step, before `append`."""

    def attended(self, step: Step) -> tuple[float, float]:
        """Entries that a decode step attends to near and far, over its sequences; the mean over heads and layers."""
        near, far = (sum(part.tokens) if part else 0 for part in self.listing(step))
        return near, far

    def lists(self) -> float:
        """Bytes of positions and weights that went to the host in the last decode step; only stores with codes."""
        return 0.0

    def notes(self, step: Step) -> dict[str, Any]:
        """What a report on a decode step should say of this store, beside its bytes."""
        return {}

    def counted(self) -> dict[str, int]:
        """What the store has counted since it was opened. May wait for the GPU."""
        return {}

    def assume(self, slots: Sequence[int], length: int, shares: Sequence[float]) -> None:
        """For benchmarks: sequences of so many tokens, of which nobody has asked anything, as if choices had been made.

        shares: how much of what lies far a KV head attends to, one head after another, over and over.
        """

    @abstractmethod
    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""

    def abort(self) -> None:
        """The step that was planned did not happen."""
        self._cache.clear()

    def cost(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        return {}

    def vacant(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given of it; None: no limit."""
        return {}

    def scores(self, layer: int, q: Tensor, scale: float, step: Step, top: Tensor | None = None) -> Tensor:
        """q `[seqs, q_heads, d]` against all that is far, by what is kept near of its keys; only stores with codes.

        -> `[seqs, kv_heads, group, n]` float32, scaled and soft-capped; past a sequence's end see `ops/score_pq.py`,
        as for `top`.
        """
        raise AttributeError(f"store {self.name!r} has no codes")

    def far_tokens(self, layer: int, step: Step) -> Tensor:
        """`[seqs]` int32 on the layer's device: entries that `scores` gives each sequence; only stores with codes."""
        raise AttributeError(f"store {self.name!r} has no codes")

    def far_token_bytes(self) -> int:
        """Bytes of one token of all its layers where it lies far."""
        return self.opening.block_bytes(1)

    def is_plain(self, step: Step) -> bool:
        """Whether a decode step does something that cannot be captured, and so runs layer by layer."""
        return False

    def took(self, layer: int, entries: float) -> None:
        """Hears how many entries a selection took of what is scored by codes, over the sequences, per KV head."""

    def fill_randomly(self) -> None:
        """Random numbers wherever keys and values would lie: for benchmarks."""
        for tier in ("near", "far"):
            if tier in self.provides:
                getattr(self, tier).fill_randomly()

    def keeps_keys(self) -> bool:
        """Whether the keys of what it scores by codes lie in DRAM too, before the values."""
        return False

    @abstractmethod
    def columns(self) -> dict[str, int]:
        """Name and width of each column of this store's step tables now, 0 for a number."""

    @abstractmethod
    def write(self, memory: TableMemory, step: Step) -> None:
        """Writes a planned decode step into its table; the rows after the step's sequences are padding."""

    def average(self, layer: int) -> Average | None:
        """The average weights of the near entries that every decode step adds to, where somebody wants them."""
        return None

    def after(self, layer: int, step: Step) -> None:
        """A layer's attention in a decode step has been started; what follows may be beside it."""

    def rejoin(self) -> bool:
        """The last of what a decode step does: whatever was started beside it is waited for. Whether anything was."""
        return False

    def reaches_far(self, step: Step) -> bool:
        """Whether a decode step may attend to anything far."""
        return False

    def far_table(self, slots: int, width: int) -> Tensor:
        """`[slots, width]` int32: the first far blocks of the first slots."""
        raise AttributeError(f"store {self.name!r} has no arena")

    @property
    def near(self) -> BlockMemory:
        """Block memory in the GPU tier."""
        raise AttributeError(f"store {self.name!r} has no GPU tier")

    @property
    def far(self) -> BlockMemory:
        """Block memory in DRAM."""
        raise AttributeError(f"store {self.name!r} has no arena")

    @abstractmethod
    def release(self) -> None:
        """Gives every byte back to the ledger."""

    def view(self, layer: int, step: Step) -> Selection:
        """`listing` as tensors, near on the layer's device, far on the host. The same for every layer of a device."""
        if step.phase is Phase.DECODE:
            return self.step_table.view()
        device = self.opening.layers[layer].device

        def build() -> Selection:
            near, far = self.listing(step)
            return Selection(_block_list(near, device), _block_list(far, torch.device("cpu")))

        return self._once(("view", step, device), build)

    def _once(self, key: object, build: Callable[[], T]) -> T:
        """`build()`, computed once per step."""
        if key not in self._cache:
            self._cache[key] = build()
        return cast("T", self._cache[key])


def visible(step: Step) -> tuple[int, ...]:
    """Tokens of each sequence that a set-wise view covers in this step."""
    return step.lengths if step.phase is Phase.DECODE else step.history


def _block_list(listing: Listing | None, device: torch.device) -> BlockList | None:
    longest = max(listing.tokens, default=0) if listing else 0
    if listing is None or longest == 0:
        return None
    width = max(map(len, listing.ids))
    table = torch.tensor([row + [0] * (width - len(row)) for row in listing.ids], dtype=torch.int32)
    tokens = torch.tensor(listing.tokens, dtype=torch.int32)
    return BlockList(table[:, None].to(device), tokens[:, None].to(device), longest)
