"""Quest: the blocks whose digests promise the most (Tang et al., 2024, section 3.3; ScoutAttention, section 3.2)."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.lists import Residents
from coattn.kernels.pick_blocks import pick_blocks
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.index.digests import Digests
from coattn.parts.select.base import Select
from coattn.parts.select.picks import Picks, rows_of
from coattn.parts.select.top_tokens import best
from coattn.types import BlockList, Selection, Step

NEWEST = 2
"""Blocks that are always attended where everything lies on the GPU; elsewhere the window."""


@dataclass
class DigestTop(Select):
    """Attends to the best blocks of each KV head, the newest always among them.

    See `score_blocks` for the score of a block. A step with many tokens, whose queries would each want their own list,
    attends to everything. Over a pool of resident blocks, all of these are attended, whether picked or not, and of the
    picked ones in DRAM those that are not resident (ScoutAttention, Algorithm 1, line 10).
    """

    name = "digest_top"
    needs = frozenset({"digests", "all_tokens"})
    provides = frozenset({"picks"})
    capturable = True
    help_text = {
        "budget": "tokens attended per KV head, counted in whole blocks, the newest ones included",
        "sink_blocks": "first blocks of a sequence that are always attended",
        "dense_layers": "first layers that attend to everything",
    }

    budget: int = 2048
    sink_blocks: int = 0
    dense_layers: int = 0
    picks: Picks | None = field(init=False, repr=False, default=None)
    """What decode steps over a DRAM tier pick; None before the first."""
    index: Digests = field(init=False, repr=False)
    _pools: Any = field(init=False, repr=False, default=None)
    """Maintenance that has pools of resident blocks, or None."""
    _empty: dict[int, Residents] = field(init=False, repr=False, default_factory=dict)
    """By layer: a pool that nobody fills, where there is no maintenance that has one."""
    _host: bool = field(init=False, repr=False, default=False)
    """Whether the last decode step had anything in DRAM to pick from."""

    def __post_init__(self) -> None:
        check_count("budget", self.budget, 1)
        check_count("sink_blocks", self.sink_blocks, 0)
        check_count("dense_layers", self.dense_layers, 0)

    def check(self, config: CacheConfig) -> None:
        always = newest(config) + self.sink_blocks
        least = (always + 1) * config.block
        if self.budget < least:
            raise ConfigError(
                f"budget is {self.budget}, but {always} block(s) of {config.block} tokens are always attended, and one "
                "more must be picked.",
                f"Give {least} or more, or a smaller block.",
            )

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        self._pools = maintenance if "pool" in maintenance.provides else None

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": tokens}

    def most(self) -> int | None:
        """The budget; where a pool of residents is attended as a whole, as many misses may come beside it."""
        if self.dense_layers:
            return None
        return self.budget if self._pools is None else 2 * self.budget

    def pick(self, call: AttentionCall) -> Selection:
        visible = call.visible
        if call.table is None or call.layer < self.dense_layers:
            return visible
        blocks, self._host = self.budget // self.cache.block, call.table.host
        if self.cache.host is not None:
            return self._pick_tiered(call, call.table, blocks) if call.table.host else visible
        assert visible.gpu is not None, "a decode step sees its own token"
        return Selection.of(self._pick_listed(call, visible.gpu, blocks))

    def _pick_listed(self, call: AttentionCall, listed: BlockList, count: int) -> BlockList:
        """The best of a list that all heads share, as a list for each head."""
        block = self.cache.block
        if listed.longest <= count * block:
            return listed
        # the newest are taken anyway, and the digest of the very newest may be that of a step before
        older = ((-(-listed.tokens // block) - NEWEST) * block).clamp(min=0)
        before = replace(listed, tokens=older)
        scores = self.index.listed_scores(call.layer, call.q[:, 0], before, call.scale, self.sink_blocks)
        return best(scores, listed, block, min(count, scores.shape[-1]), NEWEST)

    def _pick_tiered(self, call: AttentionCall, table: StepTable, count: int) -> Selection:
        """Of the best blocks in DRAM those that are not resident; and beside the window every resident one."""
        layer, block, rows = call.layer, self.cache.block, rows_of(table)
        pool = self._pool(layer)
        if self.picks is None:
            places = pool.held.shape[-1]
            self.picks = Picks(dict(self.cache.spec.layers), table.memory.batch, self.cache.gpu.width, places)
        lists = self.picks.lists(layer, min(count - newest(self.cache.config), rows.host_blocks.shape[1]))
        pick_blocks(self.index.scores(layer, call.q[:, 0], rows, call.scale), rows, pool, lists)
        ids = lists.gpu[: table.rows]
        return Selection.of(
            BlockList(ids, lists.gpu_lens[: table.rows], block * ids.shape[-1]),
            BlockList(lists.host, lists.host_lens, block * lists.host.shape[-1]),
        )

    def _pool(self, layer: int) -> Residents:
        if self._pools is not None:
            return cast("Residents", self._pools.pool(layer))
        if layer not in self._empty:
            spec, shape = self.cache.spec, self.cache.spec.layers[layer]
            nobody = torch.full((spec.seqs + 1, shape.kv_heads, 1), -1, dtype=torch.int32, device=shape.device)
            self._empty[layer] = Residents(nobody, 0, self.cache.block, self.sink_blocks)
        return self._empty[layer]

    def report(self, step: Step) -> dict[str, Any]:
        if self.cache.host is None:
            layers = self.cache.spec.layers
            dense = sum(layer < self.dense_layers for layer in layers) / len(layers)
            picked = sum(min(n, self.budget) for n in step.lengths)
            return {"attended_gpu": dense * sum(step.lengths) + (1 - dense) * picked}
        # what was picked is of the last step that had anything to pick
        attended = self.picks.attended(step.seqs) if self.picks is not None and self._host else None
        return {} if attended is None else {"attended_gpu": attended[0], "attended_host": attended[1]}

    def release(self) -> None:
        self.picks = None
        self._empty.clear()


def newest(config: CacheConfig) -> int:
    """Blocks that are always attended at the end of a sequence."""
    return NEWEST if config.host is None else getattr(config, "window_blocks", None) or 1
