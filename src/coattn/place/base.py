"""What a place is: it attends to the part of a selection that it can reach."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from coattn.part import Part
from coattn.state import AttnState, Split
from coattn.store.base import Opening, Store
from coattn.store.step_table import StepTable
from coattn.trace.step import Span
from coattn.types import LayerShape, Selection, Step

State = AttnState | Split
Result = Callable[[], State]
"""Fetches what a place was started on."""


@dataclass(frozen=True)
class Call:
    """One layer's attention over stored tokens, as the places see it."""

    layer: int
    shape: LayerShape
    q: Tensor
    """`[seqs, queries, q_heads, head_dim]`"""
    scale: float
    step: Step
    store: Store
    beside: bool = False
    """Whether the caller is already on a side stream."""
    mailbox: bool = False
    """Whether host places are asked by mailbox (`StepTable.mailbox`), or by threads."""


@dataclass
class Place(Part):
    """Computes attention over its part of a selection; `covers` names that part."""

    axis: ClassVar[str] = "place"
    covers: ClassVar[str]
    """The field of Selection it attends to: `near`, `far`, `weighted` or `tail`."""
    asynchronous: ClassVar[bool] = False
    """Whether it works on the host and may overlap with the GPU."""

    opening: Opening = field(init=False, repr=False)

    def least(self, opening: Opening, store: Store) -> int:
        """Bytes of the GPU tier that the place cannot work without."""
        return 0

    def check(self, store: Store) -> None:
        """Raises ConfigError where the place cannot attend to what a store with these parameters keeps."""

    def open(self, opening: Opening, store: Store) -> None:
        """Allocates working memory in the GPU tier, where the place needs any. After the store's own `open`."""
        self.opening = opening

    def expect(self, layer: int, picked: Selection) -> None:
        """Hears what the next `run` will be asked for; only `pull` does something with it."""

    @abstractmethod
    def run(self, call: Call, picked: Selection) -> State:
        """Attention over this place's part of `picked`, on the device of `call.q`."""

    def start(self, call: Call, picked: Selection) -> Result:
        """Begins the same; only asynchronous places return before it is done."""
        state = self.run(call, picked)
        return lambda: state

    def prepare(self, table: StepTable) -> None:
        """Steps with mailboxes are about to be captured; this table has their widths and their addresses."""

    def arm(self, rows: int) -> None:
        """A captured step of so many sequences is about to be replayed."""

    def settle(self) -> None:
        """The replay is over. Raises if this place's part of it failed."""

    def spans(self) -> list[Span]:
        """What was handed over in the last replay, layer by layer; only places that work beside the GPU."""
        return []

    def fetches(self) -> list[tuple[str, int, int]]:
        """`(name, start, end)` on the GPU's clock: when the GPU only fetched KV over PCIe in the last replay."""
        return []

    def drop_captures(self) -> None:
        """No step captured so far will be replayed again."""

    def release(self) -> None:
        """Gives every byte back to the ledger."""
