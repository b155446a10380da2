"""HGCA's rule: an entry is kept where its weight exceeds a share of what is usual for its head (section 3.2.2)."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coattn.part import check_number
from coattn.parts.call import AttentionCall
from coattn.parts.maintenance.entries.entries import Entries
from coattn.parts.select.base import Select
from coattn.types import Selection


@dataclass
class MawThreshold(Select):
    """Attends to the window, and in DRAM to the entries that were kept when they left it.

    Of weights taken over n entries, those above `beta / n` are kept, per KV head.
    """

    name = "maw_threshold"
    needs = frozenset({"averages", "entries"})
    provides = frozenset({"keeps_entries"})
    capturable = True
    help_text = {
        "beta": "an entry stays if its weight exceeds beta / n; 0 keeps everything",
    }

    beta: float = 1.0
    maintenance: Entries = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0)

    def is_exact(self) -> bool:
        return self.beta == 0

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"beta": 0}

    def keep(self, weights: Tensor, entries: int) -> Tensor:
        """weights `[..., kv_heads, n]` of a softmax over so many entries -> which of them stay."""
        return weights > self.beta / entries if self.beta else weights >= 0

    def pick(self, call: AttentionCall) -> Selection:
        visible, table = call.visible, call.table
        if table is None or visible.host is None:
            return visible
        return Selection.of(visible.gpu, self.maintenance.listed(call.layer, table))
