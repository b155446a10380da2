"""SnapKV's rule: of a prompt stay the positions that its last queries weigh most, and all that comes later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from coattn.cache.kv import KVCache
from coattn.errors import ConfigError
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.select.base import Select
from coattn.parts.select.top_tokens import at_places
from coattn.types import BlockList, Selection

POOLS = ("max", "avg")


@dataclass
class PromptTop(Select):
    """Attends to what was kept of the prompt for each KV head, and to every token after it.

    Blocks of one token make a block list a list of tokens. Prompts and turns attend to everything.
    """

    name = "prompt_top"
    needs = frozenset({"whole_kv", "positions"})
    provides = frozenset({"keeps_positions"})
    capturable = True
    fixes = {"block": 1}
    help_text = {
        "budget": "tokens of a prompt that each KV head keeps, the window included; later ones are all kept",
        "window": "last tokens of a prompt whose queries choose; they are kept themselves",
        "kernel": "positions that a weight is pooled over, an odd number; 1: none but its own",
        "pooling": "what they are pooled to: max or avg",
    }

    budget: int = 1024
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    _kept: Any = field(init=False, repr=False)
    """Maintenance that chose positions of a prompt."""

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("budget", self.budget, self.window + 1)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel is {self.kernel}, but must be odd.", f"Set kernel={self.kernel + 1}.")
        if self.pooling not in POOLS:
            raise ConfigError(f"pooling is {self.pooling!r}, but must be max or avg.", "Leave it out for max.")

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        self._kept = maintenance

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": max(tokens, self.window + 1)}

    def uncaptured(self) -> str | None:
        return None if self.cache.host is None else "its lists of what lies in DRAM are made on the host"

    @property
    def older(self) -> int:
        """Positions before the window that each KV head keeps."""
        return self.budget - self.window

    def scores(self, weights: Tensor) -> Tensor:
        """Softmax weights `[group, queries, n]` of one KV head over a prompt -> `[n - window]` float32."""
        summed = weights.sum(1)[:, : -self.window]
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        pooled: Tensor = pool(summed, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.mean(0)

    def pick(self, call: AttentionCall) -> Selection:
        visible = call.visible
        gpu, host = visible.gpu, visible.host
        if call.table is None:
            return visible
        assert gpu is not None, "a decode step sees its own token"
        width = gpu.longest + (0 if host is None else host.longest)
        places, gone = self._kept.places(call.layer, call.table.seq, width)
        if host is None:
            ids = gpu.table.expand(-1, places.shape[1], -1).gather(2, places).contiguous()
            count = (gpu.tokens - gone[:, None]).expand(-1, places.shape[1]).contiguous()
            return Selection.of(BlockList(ids, count, width))
        edge = host.tokens.to(places.device)[:, :, None]
        count = (edge + gpu.tokens[:, :, None]) - gone[:, None, None]
        real = torch.arange(width, device=places.device) < count
        here, there = real & (places >= edge), real & (places < edge)
        return Selection.of(at_places(gpu, places - edge, here), at_places(host, places, there))
