"""Sketches of keys in the GPU tier: a few bits a token, in terms of the model, and sums over keys and values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coattn.cache.block_table import BlockGeneration
from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.layout.newest import NewestBlocks
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.cuda import attend_pool as attending
from coattn.kernels.cuda import bound_scores as bounding
from coattn.kernels.cuda import renew_pool as renewing
from coattn.kernels.cuda import score_sketch as scoring
from coattn.kernels.cuda.nvrtc import Form, arch_of, available, compile_all
from coattn.kernels.fill_pool import fill_pool, weights
from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.quantise.rows import HEAD_SIZES
from coattn.kernels.quantise.sketch import LEFT, SPREADS, WORD, Scores, Sketched, Sketcher, Spread, fit, spread_of
from coattn.kernels.rest import Rest, flush_rest, sum_rest, width
from coattn.kernels.sketch import flush_sketch, lost, score_sketch
from coattn.kernels.upload import upload
from coattn.part import MOST, check_count
from coattn.parts.index.base import BookedIndex, KeyMemory
from coattn.types import LayerShape, Step
from coattn.units import ceil_div

SAMPLE_TOKENS = 4096
"""Keys that a fit looks at, evenly spaced."""
GROWTH = 2
"""A sequence that has grown by this factor gets a larger pool. Tables that were made from a sequence are made anew from
one that is longer by it."""
PINNED_TOKENS = 128
"""Tokens of a KV head that stay in its pool because the sketch holds their keys worst: a few bits say where most keys
are, and may say of a key like no other that it weighs a million times less than it does."""
FIRST_TOKENS = 4096
"""Longest sequence that pools have books for at first, where nobody says how many tokens come."""


class _Filling(NamedTuple):
    """The full blocks of a sequence, their numbers on devices, and whether some keys were not coded by these tables."""

    known: list[BlockGeneration]
    ids: dict[torch.device, Tensor]
    stale: bool


@dataclass
class Sketch(BookedIndex):
    """Of every full block in DRAM: a few bits of each key; of all but the first, what stands in for what is left out.

    A key's bits hang on the key and on the tables, which are the model's: sequences share them. Tables come from a
    file, or are made from the first sequence that is decoded.

    Owner and writer: this index, when a block has become full, and the maintenance that fills pools. Reader: the rule.
    """

    name = "sketch"
    needs = frozenset({"whole_kv", "host", "fits"})
    provides = frozenset({"sketch"})
    beside = True
    resumes = True
    books_what = "How keys are sketched"
    help_text = {
        "code_bytes": "bytes of GPU memory for each token and KV head, a multiple of 4, of which 6 bits a channel are "
        "made use of; unset: a quarter of the head size, in wholes of 16, which is 6.25% of keys and values in 16 bits",
        "sketch": "file that `coattn calibrate auto` wrote, which says how the model's keys spread; unset: an engine "
        "measures it once for each model, and without an engine it is taken from the first sequence",
    }

    code_bytes: int | None = None
    sketch: str | None = None
    memory: KeyMemory = field(init=False, repr=False)
    """Planes of the keys of blocks in DRAM, in words of 32 bits."""
    tables: dict[int, Sketcher] = field(init=False, repr=False, default_factory=dict)
    """By layer; all zeros until they are made."""
    made: int = field(init=False, repr=False, default=0)
    """How often tables were made."""
    coded: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    """By block, as which generation its keys were coded by these tables; blocks from a file are of another."""
    seen_tokens: int = field(init=False, repr=False, default=0)
    """Tokens of the sequence from which they were made."""
    sums: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer, of each slot: see `Rest`; the last slot is for padding rows."""
    pools: dict[int, PoolTensors] = field(init=False, repr=False, default_factory=dict)
    """By layer: tokens that were wanted lately, in GPU memory."""
    ending: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By sequence whose prompt ends in this step: its last queries in the layer that is stored next."""
    filled: dict[int, tuple[int, int]] = field(init=False, repr=False, default_factory=dict)
    """By sequence: `made` when its keys were coded, and full blocks that it had when its pool was filled."""

    _filling: dict[int, "_Filling"] = field(init=False, repr=False, default_factory=dict)
    """By sequence whose pool is being filled, layer by layer."""

    def __post_init__(self) -> None:
        if self.code_bytes is not None:
            check_count("code_bytes", self.code_bytes, 4)
            if self.code_bytes % 4:
                raise ConfigError(f"code_bytes is {self.code_bytes}, but must be a multiple of 4.", "Set it to 16.")
        if self.sketch is not None:
            SPREADS.read_origin(self.sketch)

    def is_exact(self) -> bool:
        return True  # what it says is used to choose by alone

    def planes(self, shape: LayerShape) -> int:
        most = shape.head_dim * (len(LEFT) - 1) // WORD * WORD
        # as kernels have them; heads of fewer channels have none
        step = WORD if shape.head_dim < min(HEAD_SIZES) else 4 * WORD
        wanted = ceil_div(shape.head_dim * 2, step) * step if self.code_bytes is None else 8 * self.code_bytes
        return max(WORD, min(wanted, most))

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        slots, longest, plan = spec.seqs + 1, spec.tokens or FIRST_TOKENS, spec.plan
        places, total = plan.pool_blocks * config.block, 0
        for s in spec.layers.values():
            total += Sketcher.bytes(s.kv_heads, self.planes(s), s.head_dim, s.dtype)
            total += 4 * slots * s.kv_heads * width(s.head_dim)
            total += PoolTensors.bytes(s.kv_heads, slots, longest, places, s.q_heads, s.head_dim, plan.pool_packed)
        return total

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        words = self.planes(spec.shape) // WORD
        self.memory = KeyMemory(spec, config.block, "A sketch of every key", words, torch.int32)
        return self.memory

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        spec = cache.spec
        for layer, s in spec.layers.items():
            self.tables[layer] = Sketcher.zeros(s.kv_heads, self.planes(s), s.head_dim, s.dtype, s.device)
            self.sums[layer] = torch.zeros(spec.seqs + 1, s.kv_heads, width(s.head_dim), device=s.device)
        cache.dram.table.set_before_swap(self._swap)
        self._make_pools(spec.tokens or FIRST_TOKENS)
        if cache.host is not None and available(spec.device):
            compile_all(self.kernels(), arch_of(spec.device))
        if self.sketch is not None and spec.device.type != "meta":
            self._make_tables(SPREADS.load(self.sketch, spec.layers), MOST)

    def _make_pools(self, tokens: int) -> None:
        gpu, spec, plan = cast("NewestBlocks", self.cache.gpu), self.cache.spec, self.cache.spec.plan
        places, slots = plan.pool_blocks * self.cache.block, spec.seqs + 1
        rows = min(PINNED_TOKENS, places // 4), plan.pool_packed, plan.pool_active_tokens
        for layer, s in spec.layers.items():
            memory = gpu.memory[layer]
            self.pools[layer] = PoolTensors.make(memory, gpu.pools, slots, tokens, places, s.q_heads, *rows)
        gpu.pooled.clear()

    def reserve(self, tokens: int) -> bool:
        """Books of the pools for sequences of so many tokens; whether they had to be made anew, all empty."""
        if tokens <= self.pools[next(iter(self.pools))].tokens:
            return False
        self._make_pools(2 * tokens)
        return True

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        for part in filled:
            self._store(layer, self._upload(part.ids, part.k.device), part.k)
            if self.made and layer == next(iter(self.tables)):  # if tables change meanwhile, none of it counts
                known = self.cache.dram.table.generations(part.slot, part.first + len(part.ids))
                self.coded.update(known[part.first :])
            self._end_prompt(layer, part, self.ending.pop(part.slot, None))
        if table is None:
            return
        gpu, block, to = self.cache.gpu.memory[layer], table.write_block, table.column("flush_to")
        flush_rest(gpu, self.sums[layer], block, to, table.seq, self.tables[layer])
        flush_sketch(gpu, self.memory[layer], block, to, self.tables[layer])

    def fits(self, slot: int, blocks: int) -> bool:
        """Whether a sequence of so many full blocks can be attended to as it is: its keys are coded by these tables,
        and its pool was filled when it was at least half as long."""
        made, filled = self.filled.get(slot, (0, 0))
        return made == self.made and blocks < GROWTH * filled

    def fit(self, slot: int, blocks: int, moments: Mapping[int, Tensor]) -> None:
        """Makes tables anew by the keys of a sequence much longer than the one they were made from; moments: of its
        queries. Sequences that were coded before are coded anew before their next decode step."""
        tokens, block, start = blocks * self.cache.block, self.cache.block, 1 if blocks > 1 else 0
        if tokens < GROWTH * self.seen_tokens:
            return
        stride = max(1, (tokens - start * block) // SAMPLE_TOKENS)
        read = ((layer, self.cache.read(layer, slot, range(start, blocks))[0]) for layer in self.tables)
        # the first tokens are like no others
        self._make_tables({layer: spread_of(keys[::stride], moments.get(layer)) for layer, keys in read}, tokens)

    def fill(self, layer: int, slot: int, first: int, kv: tuple[Tensor, Tensor], last: Tensor | None) -> None:
        """Fills a layer's pool, codes keys if some were not coded by these tables, and sums up keys and values if they
        were not by these. To be called for one layer after the other.

        kv: `[tokens, kv_heads, d]` of all full blocks. first: the block up to which steps attend in DRAM; of those,
        keys that the sketch holds worst stay in the pool. What the last queries `[n, q_heads, d]` attend to most fills
        the rest of it where a sequence has none yet; else it goes on with what it has.
        """
        gpu, block, pool = cast("NewestBlocks", self.cache.gpu), self.cache.block, self.pools[layer]
        tables = self.tables[layer]
        if layer == next(iter(self.tables)):
            known = self.cache.dram.table.generations(slot, len(kv[0]) // block)
            own, stale = [i for i, _ in known], any(self.coded.get(i) != given for i, given in known)
            ids = {device: self._upload(own, device) for device in {x.device for x in self.pools.values()}}
            self._filling[slot] = _Filling(known, ids, stale)
        known, ids, stale = self._filling[slot]
        if stale:
            self._store(layer, ids[pool.device], kv[0])
        start, end = gpu.sinks * block, first * block
        if self.filled.get(slot, (0, 0))[0] != self.made:  # the first tokens are like no others
            self.sums[layer][slot] = sum_rest(kv[0][start:], kv[1][start:], tables)
        count = min(pool.places, max(0, end - start)) // block * block
        unlike = lost(kv[0][start:end], self.memory[layer], ids[pool.device][gpu.sinks : first], tables)
        k, v = (x[start:end].transpose(0, 1) for x in kv)
        if slot in self.filled:  # what steps want now, which the prompt's queries do not know
            weight = pool.recency(slot, k.shape[1]).double()
        elif last is None:
            weight = torch.arange(k.shape[1], device=k.device).repeat(k.shape[0], 1).float()  # the newest
        else:
            weight = weights(last, k)
        # sorted as a whole: the best of many are found by more kernels than that takes
        pinned = unlike.sort(descending=True).indices[:, : min(pool.pins, count)]
        fill_pool(pool, slot, weight.scatter_(1, pinned, torch.inf).sort(descending=True).indices[:, :count], k, v)
        gpu.pooled[slot] = count // block
        if layer == next(reversed(self.tables)):
            del self._filling[slot]
            self.coded.update(known)
            self.filled[slot] = self.made, len(known)

    def _make_tables(self, spreads: Mapping[int, Spread], tokens: int) -> None:
        self.made += 1  # at first: tables that are half made fit nobody
        self.coded.clear()
        # one call for all of them: most of the time is in small matrices
        whole = Spread(*(torch.cat([x.cpu() for x in part]) for part in zip(*spreads.values(), strict=True)))
        made, start = fit(whole, self.planes(self.cache.spec.shape)), 0
        for layer, shape in self.cache.spec.layers.items():
            self.tables[layer].copy_(made[start : start + shape.kv_heads])
            start += shape.kv_heads
        self.seen_tokens = tokens

    def saved(self, layers: Sequence[int], table: StepTable) -> list[Callable[[], None]]:
        return [self.pools[layer].saved(table.seq) for layer in layers if layer in self.pools]

    def truncate(self, slot: int, keep: int) -> None:
        """Codes stay good. Values are counted and the pool is filled before the next step that attends in DRAM."""
        self.ending.pop(slot, None)
        self.filled.pop(slot, None)
        cast("NewestBlocks", self.cache.gpu).pooled.pop(slot, None)

    def learns(self) -> bool:
        return not self.made

    def kernels(self) -> set[Form]:
        """Those in CUDA C++ that decode steps of so many sequences need, of numbers of them that steps are made for."""
        host, seqs, found = self.cache.host, self.cache.spec.seqs, set[Form]()
        assert host is not None
        for layer, s in self.cache.spec.layers.items():
            pool, n = self.pools[layer], host.table.rows.shape[1] * self.cache.block
            kept = torch.empty(0, s.kv_heads, self.cache.block, self.planes(s) // WORD, device="meta")
            for rows in {1, 2, 4, *range(8, seqs, 8), seqs}:
                q = torch.empty(rows, s.q_heads, s.head_dim, dtype=s.dtype, device="meta")
                if scoring.lacks_form(q, kept) is None:
                    found.add(("score_sketch.cu", tuple(scoring.constants(q, kept, n, s.softcap).items())))
            if pool.packed is not None:
                found.add(("attend_pool.cu", tuple(attending.constants(q[:, None], pool.gpu, s.softcap).items())))
            if pool.places:
                found.add(("renew_pool.cu", tuple(renewing.constants(pool.places).items())))
            found.add(("bound_scores.cu", (("THREADS", bounding.THREADS),)))
        return found

    def rest(self, layer: int) -> Rest:
        """Of all entries of sequences."""
        return Rest(self.sums[layer], self.tables[layer])

    def scores(self, layer: int, q: Tensor, table: StepTable, scale: float) -> Callable[[], Scores]:
        """q `[rows, q_heads, d]` against all that a decode step may attend to in DRAM; to be called for them."""
        blocks, lens = table.column("host_blocks"), table.column("host_lens")
        keys = Sketched(self.memory[layer], blocks, lens, self.tables[layer], table.seq)
        return score_sketch(q, keys, scale, self.cache.spec.layers[layer].softcap, self.pools[layer])

    def report(self, step: Step) -> dict[str, Any]:
        """A key's bytes in the sketch, of a token's."""
        return {"code_share": self.memory.block_bytes / self.cache.spec.block_bytes(self.cache.block)}

    def release(self) -> None:
        super().release()
        for held in (self.tables, self.sums, self.coded, self.ending, self.filled, self.pools, self._filling):
            held.clear()

    def _end_prompt(self, layer: int, part: Filled, last: Tensor | None) -> None:
        """Fills a layer's pool already here if GPU memory has the whole prompt, so that no decode step waits for it."""
        gpu, prompts, blocks = self.cache.gpu, self.cache.prompts, part.first + len(part.ids)
        first, tokens = gpu.first(blocks * self.cache.block + 1), blocks * self.cache.block
        whole = not part.first or (prompts is not None and part.slot in prompts.held)
        if last is not None and whole and first > gpu.sinks:
            kv = prompts.read(layer, part.slot, tokens) if prompts and part.first else (part.k, part.v)
            self.fill(layer, part.slot, min(first, blocks), kv, last)

    def _swap(self, slot: int, other: BlockGeneration) -> None:
        if self.coded.get(other[0]) != other[1]:
            self.filled.pop(slot, None)

    def _store(self, layer: int, to: Tensor, k: Tensor) -> None:
        """Codes whole blocks of keys `[n, kv_heads, d]`. to: where, int32."""
        keys = k.view(len(to), self.cache.block, *k.shape[1:]).transpose(1, 2)[:, :, None]
        places = torch.arange(len(to), dtype=torch.int32, device=to.device)
        flush_sketch(keys, self.memory[layer], places, to, self.tables[layer])

    def _upload(self, ids: list[int], device: torch.device) -> Tensor:
        """int32, the same for every layer of a step."""
        return self.cache.gpu.once((device, tuple(ids)), lambda: upload(torch.tensor(ids, dtype=torch.int32), device))
