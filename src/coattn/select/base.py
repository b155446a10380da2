"""What a selection rule is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from coattn.part import Part
from coattn.store.base import Store
from coattn.types import Selection, Step


@dataclass
class Select(Part):
    """Picks, per layer and step, the stored entries that the queries attend to."""

    axis: ClassVar[str] = "select"
    exact: ClassVar[bool]
    """Whether nothing that the store keeps is left out: the rule's half of an exact method."""
    recordable = False
    """Whether `pick` can be captured in a CUDA graph: nothing on the host, no synchronisation, no generator."""

    scale: float = field(init=False, repr=False, default=1.0)
    """What the layer multiplies its scores with; the runtime sets it before every `pick`."""

    def uncaptured(self) -> str | None:
        """Why a decode step with this rule cannot be captured in a CUDA graph, or None. After `open`."""
        return None if self.recordable else "its class does not say `recordable = True`"

    def open(self, store: Store) -> None:
        """Meets the store whose entries it will pick, after the store's own `open`."""

    def is_exact(self) -> bool:
        """Whether it leaves nothing out with the parameters it has."""
        return type(self).exact

    def whole(self, tokens: int) -> dict[str, Any] | None:
        return {} if self.is_exact() else None

    def fills(self, store: Store) -> frozenset[str]:
        """The fields of Selection that `pick` may fill over such a store; a place must cover each."""
        return frozenset({"near", "far"}) & store.provides

    def most(self) -> int | None:
        """Entries that a KV head attends to at most, where the rule has such a number."""
        return None

    @abstractmethod
    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        """What q `[seqs, queries, q_heads, head_dim]` attends to of what the store shows in this step."""


@dataclass
class Stored(Select):
    """Base of rules that take whatever the store shows, the same whole blocks for every head."""

    provides = frozenset({"whole_blocks"})
    recordable = True

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        return store.view(layer, step)
