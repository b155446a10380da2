"""One layer's attention over stored tokens, as rules, executors and schedules see it."""

from dataclasses import dataclass

from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.parts.index.base import Index
from coattn.types import LayerShape, Selection, Step


@dataclass(frozen=True)
class AttentionCall:
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

    @property
    def visible(self) -> Selection:
        """Everything the queries may see."""
        return self.cache.visible(self.layer, self.step) if self.table is None else self.table.visible()
