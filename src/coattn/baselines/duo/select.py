"""DuoAttention's rule: retrieval heads attend to everything, the others to the first tokens and the newest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.baselines.duo.head_labels import HeadLabels, read_labels
from coattn.cache.kv import KVCache
from coattn.errors import ConfigError
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.types import BlockList, LayerShape, Selection, Step
from coattn.units import ceil_div

ALTERNATE = "alternate"


@dataclass
class RetrievalHeads(Select):
    """Retrieval heads attend to every token; the other KV heads to the blocks of the first and of the newest tokens.

    Prompts and turns attend to everything.
    """

    name = "retrieval_heads"
    needs = frozenset({"all_on_gpu"})
    capturable = True
    help_text = {
        "heads": "file that `coattn calibrate duo` wrote; alternate: every second KV head, to measure speed with",
        "sinks": "first tokens that every head attends to, in whole blocks",
        "recent": "newest tokens that every head attends to, in whole blocks",
    }

    heads: str | None = None
    sinks: int = 64
    recent: int = 256
    streaming: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer: `[kv_heads]`, whether a head is none that retrieves."""
    _labels: HeadLabels | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        if self.heads is not None and not isinstance(self.heads, str):
            raise ConfigError(f"heads is {self.heads!r}, but must be the name of a file.", "Leave it out, or name one.")
        if self.heads not in (None, ALTERNATE):
            self._labels = read_labels(str(self.heads))

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        layers = cache.spec.layers
        labels = self._alternate(layers) if self._labels is None else self._labels.of(layers, str(self.heads))
        for i, shape in layers.items():
            self.streaming[i] = ~torch.tensor(labels[i], device=shape.device)

    def _alternate(self, layers: Mapping[int, LayerShape]) -> dict[int, list[bool]]:
        """Every second head of all; only on demand where the layers are a model's."""
        if self.heads is None and any(shape.mark is not None for shape in layers.values()):
            raise ConfigError(
                "Rule 'retrieval_heads' needs labels of the model's heads, and none were given.",
                "Make them with `coattn calibrate duo --model MODEL --out FILE`, and set heads=FILE.",
            )
        return {i: [(i + head) % 2 == 0 for head in range(shape.kv_heads)] for i, shape in layers.items()}

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"recent": tokens}

    def pick(self, call: AttentionCall) -> Selection:
        listed, block = call.visible.gpu, self.cache.block
        if call.table is None or listed is None:
            return call.visible
        streaming, first = self.streaming[call.layer], ceil_div(self.sinks, block)
        gap = ((listed.tokens - self.recent).clamp(min=0) // block - first).clamp(min=0)  # [seqs, 1] blocks left out
        gap = torch.where(streaming, gap, 0)  # [seqs, kv_heads]
        place = torch.arange(listed.table.shape[-1], device=gap.device)
        place = torch.where(place < first, place, (place + gap[:, :, None]).clamp(max=len(place) - 1))
        table = listed.table.expand(-1, len(streaming), -1).gather(2, place).contiguous()
        return Selection.of(BlockList(table, (listed.tokens - gap * block).int().contiguous(), listed.longest))

    def report(self, step: Step) -> dict[str, Any]:
        """What heads attend to on average, and its bytes: what would be held if each head had a memory of its own."""
        block, first, heads = self.cache.block, ceil_div(self.sinks, self.cache.block), self.streaming.values()
        share = sum(float(each.sum()) for each in heads) / sum(len(each) for each in heads)
        gaps = [max(0, max(0, length - self.recent) // block - first) * block for length in step.lengths]
        attended = sum(length - share * gap for length, gap in zip(step.lengths, gaps, strict=True))
        return {"attended_gpu": attended, "needed_gpu_bytes": round(attended * self.cache.spec.block_bytes(1))}

    def release(self) -> None:
        self.streaming.clear()
