"""A pool is filled with what the last queries of a prompt want, and follows what decode steps want."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from coattn.auto.index import Sketch
from coattn.cache.config import CacheConfig, check_dtype
from coattn.cache.host import scale_bytes
from coattn.cache.spec import CacheSpec, MemoryPlan
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.cuda.attend_pool import refuses
from coattn.kernels.quantise.rows import HOT, PackedRows, formless
from coattn.kernels.token_pool import bring, renew_pool
from coattn.part import check_count, check_number
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.select.base import Select
from coattn.types import Phase, Step

QUERY_DECAY_TOKENS = 2048
"""Tokens whose queries count where tables are made from a sequence; older ones count less and less."""
SINK_BLOCKS = 1
"""First blocks that stay in GPU memory: the first token can weigh most of all, and its key is so unlike the others that
a sketch takes it for up to a million times lighter."""
FILL_QUERIES = 32
"""Last queries by which the pool is filled at first."""
MAX_POOL_TOKENS = {"model": 8192, "int8": 16384}
"""How many tokens are wanted hardly grows with the length, and every step attends to all of a pool in the model's own
numbers. Tuned on an H200, see docs/methods/auto.md."""
POOL_SHARE = 0.5
"""Of the longest sequence, where the GPU budget has room. Tuned, see docs/methods/auto.md."""
POOL_MARGIN = 0.9
"""Of what would be left of the GPU budget."""
UNKNOWN_POOL_TOKENS = 2048
"""Tokens of a pool where nobody says how long sequences get."""


def pool_tokens(longest: int, share: float | None, form: str) -> int:
    """Tokens of a pool, if the GPU budget has room for them. share: of the longest sequence, where it is given."""
    return min(MAX_POOL_TOKENS[form], int(longest * (POOL_SHARE if share is None else share)))


def _max_pool_bytes(spec: CacheSpec, config: CacheConfig, sketch: Sketch, room: int) -> int:
    """What window, index, books and the blocks that a prompt brings in leave of the room for KV.

    Prompts can do with less: where they would leave next to nothing, half of that, at most a quarter of the room.
    """
    if spec.tokens is None:
        return room // 4
    blocks, left = spec.seqs * spec.tokens // config.block, room - sketch.gpu_bytes(spec, config)
    for s in spec.layers.values():
        left -= blocks * config.block * s.kv_heads * sketch.planes(s) // 8
        if getattr(config, "host_dtype", "model") != "model":
            left -= blocks * scale_bytes(config.block, s)
    window = SINK_BLOCKS + (getattr(config, "window_blocks", None) or 1)
    left -= (spec.seqs * window + spec.padding) * spec.block_bytes(config.block)
    # prompts are read through two layers of one sequence
    staged = 2 * spec.tokens * spec.shape.token_bytes
    return max(min(room // 4, left // 2), int((left - staged) * POOL_MARGIN))


@dataclass
class SketchMaintenance(Maintenance):
    """Codes a sequence's keys and fills a pool in GPU memory before its first decode step with anything in DRAM, and
    again when the sequence has doubled.

    At first a pool holds the tokens that the last queries attend to most. Tokens that steps fetch take the places of
    those that were wanted longest ago. Steps attend to all of a pool; of one in 8 bits to what was wanted last.
    """

    name = "fit"
    needs = frozenset({"sketch"})
    provides = frozenset({"fits"})
    resumes = True
    observed_queries = FILL_QUERIES
    beside = True
    patient = True
    help_text = {
        "pool_share": "tokens of each KV head that stay in GPU memory because they were wanted lately, as a share of "
        "the longest sequence; unset: half",
        "pool_dtype": "of their keys and values there: int8 or model; unset: int8 for models in 16 bits with heads of "
        "64, 80, 96 and so on to 256 channels",
        "hot": "tokens of a pool in 8 bits that a step attends to without being asked, those wanted last; others are "
        "looked up where they are wanted; unset: 4,096",
    }

    pool_share: float | None = None
    pool_dtype: str | None = None
    hot: int | None = None

    index: Sketch = field(init=False, repr=False)
    _moments: dict[int, dict[int, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By sequence and layer `[kv_heads, d, d]` float32: the sum of `q q^T`, weighted; only its shape matters."""

    _last: dict[int, dict[int, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By sequence and layer `[n, q_heads, d]`: the last queries of its prompt."""

    def __post_init__(self) -> None:
        if self.pool_share is not None:
            check_number("pool_share", self.pool_share, 0, 1)
        if self.pool_dtype is not None:
            check_dtype(self.pool_dtype, ("int8", "model"), "pool_dtype")
        if self.hot is not None:
            check_count("hot", self.hot, 1)

    def plan_memory(self, spec: CacheSpec, config: CacheConfig, index: Index, select: Select) -> MemoryPlan:
        if "scored" not in select.works(config):
            return MemoryPlan()  # other rules do not know what lies in a pool too, and would attend to it twice
        small, room = self.in_8_bits(spec, select), spec.ledger.room("gpu")
        form = "int8" if small else "model"
        tokens = UNKNOWN_POOL_TOKENS if spec.tokens is None else pool_tokens(spec.tokens, self.pool_share, form)
        blocks = max(1, tokens // config.block)
        if room is not None:
            each = spec.block_bytes(config.block)
            if small:
                shapes = spec.layers.values()
                each = config.block * sum(PackedRows.token_bytes(s.kv_heads, s.head_dim) for s in shapes)
            blocks = max(
                1, min(blocks, _max_pool_bytes(spec, config, cast("Sketch", index), room) // (spec.seqs * each))
            )
        packed = getattr(config, "host_dtype", "model") != "model"
        return MemoryPlan(
            pool_blocks=blocks,
            pool_packed=small,
            pool_active_tokens=HOT if self.hot is None else self.hot,
            extra_listed_blocks=0 if small else blocks,
            sink_blocks=SINK_BLOCKS,
            scales_on_gpu=packed,
        )

    def in_8_bits(self, spec: CacheSpec, select: Select) -> bool:
        """Whether pools are kept in 8 bits; never where everything is to be exact."""
        if select.is_exact() or self.pool_dtype == "model":
            return False
        shapes = list(spec.layers.values())
        if spec.device.type != "cuda":
            return self.pool_dtype == "int8" or not any(map(formless, shapes))
        why = next((reason for reason in map(refuses, shapes) if reason is not None), None)
        if why is not None and self.pool_dtype == "int8":
            raise ConfigError(f"Pools cannot be in 8 bits: {why}.", "Leave pool_dtype out.")
        return why is None

    def before_plan(self, step: Step) -> None:
        """Fills the pools that the step's table will list."""
        if self.index.reserve(max(step.lengths, default=0)):
            self.index.filled.clear()
        decoding = []
        for slot, history, length in zip(step.slots, step.history, step.lengths, strict=True):
            if not history:
                self.truncate(slot, length, 0)
            if not history or step.phase is not Phase.DECODE:
                self.index.truncate(slot, history)
            elif self.cache.gpu.first(length) > self.cache.gpu.sinks:
                decoding.append((history // self.cache.block, self.cache.gpu.first(length), slot))
        # the longest first: tables that were made from it stay; those that were coded by others come once more
        for blocks, first, slot in 2 * sorted(decoding, reverse=True):
            if not self.index.fits(slot, blocks):
                self.index.fit(slot, blocks, self._moments.get(slot, {}))
                for layer in self.index.tables:
                    kv, last = self.cache.read(layer, slot, range(blocks)), self._last.get(slot, {}).get(layer)
                    self.index.fill(layer, slot, min(first, blocks), kv, last)

    def observe_queries(self, layer: int, q: Tensor, step: Step, scale: float) -> None:
        shape = self.cache.spec.layers[layer]
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            if start == end:
                continue
            before = self._last.setdefault(slot, {}).get(layer, q[:0])  # however the prompt is cut into chunks
            self._last[slot][layer] = torch.cat([before, q[max(start, end - FILL_QUERIES) : end]])[-FILL_QUERIES:]
            if self.index.sketch is not None:
                if slot not in step.more and self.cache.dram.memory.form == "model":
                    self.index.ending[slot] = self._last[slot][layer]
                continue
            recent = q[max(start, end - QUERY_DECAY_TOKENS) : end].float()
            own = recent.view(len(recent), shape.kv_heads, -1, shape.head_dim)
            moment = torch.einsum("nhgd,nhge->hde", own, own)
            kept = self._moments.setdefault(slot, {})
            if layer in kept:
                moment += kept[layer] * math.exp(-(end - start) / QUERY_DECAY_TOKENS)
            kept[layer] = moment

    def after(self, layer: int, table: StepTable) -> None:
        if table.host and self.cache.spec.plan.pool_blocks:
            pool, host = self.index.pools[layer], self.cache.host
            if host is not None:  # what was attended elsewhere, or left to the mean, comes for the next steps
                bring(pool, host.memory.listed(layer), table.column("host_blocks"), table.seq)
            renew_pool(pool, table.seq)

    def prompt_state(self) -> tuple[dict[int, Any], ...]:
        return self._moments, self._last

    def abort(self, step: Step, replayed: bool) -> set[int]:
        return set(step.slots) if replayed else set()  # pools have gone on

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """The pool of a sequence that leaves its slot is filled anew when it comes back, by the queries of then."""
        if not keep:
            self._moments.pop(slot, None)
            self._last.pop(slot, None)

    def release(self) -> None:
        self._moments.clear()
        self._last.clear()
