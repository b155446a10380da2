"""One layer's attention over stored tokens, as rules, executors and schedules see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.index.base import Index
from coattn.types import LayerShape, Selection, Step, nothing_to_wait_for


@dataclass(frozen=True)
class Call:
    """A query over what a cache holds."""

    layer: int
    shape: LayerShape
    q: Tensor
    """`[seqs, queries, q_heads, head_dim]`"""
    scale: float
    step: Step
    cache: KVCache
    index: Index
    table: StepTable | None = None
    """Of a decode step; None: the step has many tokens a sequence."""
    on_side: bool = False
    """Whether the caller is already on a side stream."""
    to_fetch: bool = False
    """Whether what is picked is only to be fetched: the layer's own query picks again."""
    listed: Callable[[], None] = nothing_to_wait_for
    """Of such a call: called when the books of GPU memory say what comes, which has not come yet."""
    arrived: Callable[[], None] = nothing_to_wait_for
    """Of any other in a decode step: makes what follows wait for what comes, before GPU memory is attended."""

    @property
    def visible(self) -> Selection:
        """Everything the queries may see."""
        return self.cache.visible(self.layer, self.step) if self.table is None else self.table.visible()
