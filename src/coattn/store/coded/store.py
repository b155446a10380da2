"""Values of every token in DRAM; of its key a code in GPU memory; the newest blocks there as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.append import append
from coattn.ops.reference.append import read_rows, write_rows
from coattn.ops.score_pq import score_pq
from coattn.part import check_count
from coattn.quantise.file import Origin, read_origin
from coattn.quantise.pack import BITS, packed_bytes
from coattn.quantise.values import FORMS, LEVELS, pack_values
from coattn.store.arena import Arena
from coattn.store.base import Opening, Run
from coattn.store.blocks import BlockMemory, BlockTable, runs
from coattn.store.coded.books import Books
from coattn.store.coded.means import Means
from coattn.store.coded.planes import CodeMemory, ValueMemory
from coattn.store.ledger import Tier
from coattn.store.step_table import NOWHERE
from coattn.types import Phase, Step

CENTROIDS = 8192


@dataclass
class Coded(Arena):
    """Values in DRAM, product-quantised key codes in the GPU tier, recent tokens exact (HCAttention, section 3).

    A window of the newest blocks as in an arena. When a block is full its values go to DRAM and its keys become codes;
    both have the same block id. The keys themselves are gone when the block leaves the window, unless kept in DRAM.
    """

    name = "coded"
    provides = frozenset({"near", "weighted", "codes", "values", "value_mean", "all_tokens"})
    needs = frozenset({"weighs"})
    help_text = {
        "block": "tokens per block",
        "window_blocks": "newest blocks of a sequence kept as they are in GPU memory; None: 1",
        "sink_blocks": "first blocks of a sequence kept as they are in GPU memory too; not in the paper",
        "groups": "pieces of a key, each a code; 0: exact keys; unset: as in the codebook, or half the head size",
        "centroids": "centroids of a codebook; unset: as in the codebook, or 8,192",
        "shared": "one codebook for all groups of a layer; unset: as in the codebook, or true",
        "code_bits": "bits of a stored code: 16, or packed at 12 or 13",
        "centroid_bits": "bits of each number of a centroid: 16, or 8, which scores faster",
        "codebook": "file that `coattn calibrate hcattention` wrote; unset: made from the first keys that are coded",
        "values": "values in DRAM: model (the model's own dtype), int8 or int4",
        "keep_keys": "keep the keys in DRAM too, so that what is selected is scored again exactly",
    }

    dram: str = field(init=False, default="model")
    """There are no whole blocks in DRAM: `values` says how values are kept."""
    sink_blocks: int = 0
    groups: int | None = None
    centroids: int | None = None
    shared: bool | None = None
    code_bits: int = 16
    centroid_bits: int = 16
    codebook: str | None = None
    values: str = "model"
    keep_keys: bool = False
    books: Books = field(init=False, repr=False)
    means: Means = field(init=False, repr=False)
    _planned: tuple[int, ...] = field(init=False, repr=False, default=())
    _stale: set[int] = field(init=False, repr=False, default_factory=set)
    """Slots whose mean value a step that failed may have left wrong."""
    _turned: bool = field(init=False, repr=False, default=False)
    _taken: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    """By layer: entries that the last selection took, over its sequences; the mean over KV heads."""
    counts: Callable[[], dict[int, float]] | None = field(init=False, repr=False, default=None)
    """The same of the last captured step, asked for when somebody wants to know."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sink_blocks", self.sink_blocks, 0)
        self.sinks = self.sink_blocks
        if self.groups is not None:
            check_count("groups", self.groups, 0)
        if self.shared is not None and not isinstance(self.shared, bool):
            raise ConfigError(f"shared is {self.shared!r}, but must be true or false.", "Leave it out for true.")
        if self.codebook is not None:
            self._agree(read_origin(self.codebook))
        if self.values not in FORMS:
            raise ConfigError(f"values is {self.values!r}, but must be model, int8 or int4.", "Leave it out for model.")
        if self.values != "model" and self.keep_keys:
            raise ConfigError("keep_keys needs values in the model's dtype.", "Leave out values or keep_keys.")
        check_count("centroids", CENTROIDS if self.centroids is None else self.centroids, 2)
        if isinstance(self.code_bits, float) or self.code_bits not in BITS:
            raise ConfigError(f"code_bits is {self.code_bits!r}, but must be 12, 13 or 16.", "Leave it out for 16.")
        if self.centroid_bits not in (8, 16):
            raise ConfigError(f"centroid_bits is {self.centroid_bits!r}, but must be 8 or 16.", "Leave it out for 16.")
        most = 1 << min(self.code_bits, 15)
        if self.groups != 0 and (self.centroids or CENTROIDS) > most:
            raise ConfigError(
                f"{self.centroids or CENTROIDS:,} centroids do not fit in codes of {self.code_bits} bits.",
                f"Set centroids={most} or less, or more code_bits.",
            )

    def _agree(self, origin: Origin) -> None:
        for name in ("groups", "centroids", "shared"):
            own, given = getattr(self, name), getattr(origin, name)
            if own is not None and own != given:
                raise ConfigError(
                    f"{name} is {own!r}, but the codebook {self.codebook} has {given!r}.", f"Leave {name} out."
                )
            setattr(self, name, given)
        self._turned = origin.basis

    def is_exact(self) -> bool:
        return (self.groups == 0 or self.keep_keys) and self.values == "model"

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"groups": 0, "codebook": None, "values": "model"}

    def uncaptured(self) -> str | None:
        return "keep_keys scores what is selected on the host" if self.keep_keys else super().uncaptured()

    def keeps_keys(self) -> bool:
        return self.keep_keys

    def least(self, opening: Opening) -> int:
        blocks = 1 if opening.fixed else opening.seqs * ((opening.tokens or 0) // self.block)
        groups = self._groups(opening)
        codes = sum(
            s.kv_heads * (packed_bytes(groups, self.code_bits) if groups else s.head_dim * s.dtype.itemsize)
            for s in opening.layers.values()
        )
        beside = self._books(opening).bytes + Means.bytes(opening.layers, opening.seqs)
        return super().least(opening) + beside + blocks * self.block * codes

    def open(self, opening: Opening) -> None:
        self.opening = opening
        self.split = self._groups(opening)
        layers, ledger = opening.layers, opening.ledger
        for shape in layers.values():
            if self.split and shape.head_dim % self.split:
                raise ConfigError(
                    f"groups is {self.split}, which does not divide the head size {shape.head_dim}.",
                    f"Set groups={shape.head_dim // 2} or {shape.head_dim // 4}.",
                )
        self.ring = self.window_blocks or 1
        what = f"A window of {self.ring + self.sinks} block(s) for {opening.seqs} sequence(s)"
        self.window = BlockMemory("gpu", layers, self.block, ledger, what)
        values = ValueMemory(
            layers, self.block, ledger, "Keeping every value", with_keys=self.keep_keys, form=self.values
        )
        codes = CodeMemory(layers, self.block, ledger, "Coding every key", groups=self.split, bits=self.code_bits)
        self.stored, self.codes = values, codes
        self.table, self.code_table = BlockTable(values), BlockTable(codes)
        self.books = self._books(opening, self.codebook, opening.fixed)
        ledger.take("gpu", self.books.bytes, "A codebook for each layer")
        ledger.take("gpu", Means.bytes(layers, opening.seqs), "The mean value of each sequence")
        self.means = Means(layers, opening.seqs, self.ring)
        width = max(1, (opening.tokens or 0) // self.block)
        self.table.tabulate(opening.seqs + 1, width)
        far = opening.seqs * ((opening.tokens or 0) // self.block)
        for memory, blocks in ((self.window, self._near_blocks(opening)), (values, far), (codes, far)):
            if opening.fixed:
                memory.fix(blocks)
            else:
                memory.reserve(blocks)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if step.phase is not Phase.DECODE:
            super().append(layer, k, v, step)
            return
        table, near = self.step_table, self.window[layer]
        append(table, near, k, v)
        spill = table.spill
        assert spill is not None, "an arena's table has that column"
        if near.device.type == "cuda" and not table.by_hand:
            self._spill_by_kernels(layer, near, table.ids, spill)
            return
        for block, to in zip(table.ids.tolist(), spill.tolist(), strict=True):
            if to != NOWHERE:
                slot = block // self.ring
                self._spill(layer, slot, self.table.owned[slot].index(to), *near[block].transpose(0, 1).transpose(1, 2))

    def is_plain(self, step: Step) -> bool:
        """A block that becomes full before there is a codebook makes one; a first block is copied."""
        full = [n // self.block for n in step.lengths if n % self.block == 0]
        first = bool(full) and bool(self.split) and len(self.books.ready) < len(self.books.made)
        return self.uncaptured() is not None or first or any(n <= self.sinks for n in full)

    def most_entries(self) -> int:
        """The longest list of entries that a KV head can be given."""
        return max(1, (self.opening.tokens or 0) // self.block) * self.block

    def plan(self, step: Step) -> None:
        wanted = [(slot, n // self.block) for slot, n in zip(step.slots, step.lengths, strict=True)]
        self._planned = step.slots
        for slot, history in zip(step.slots, step.history, strict=True):
            if slot in self._stale:
                self._renew_mean(slot, history // self.block)
        tables = (self.table, self.code_table)
        for table in tables:
            table.require(wanted)
        # the same requests in the same order: a block has the same id in both
        for table in tables:
            for slot, blocks in wanted:
                table.ensure(slot, blocks)

    def abort(self) -> None:
        super().abort()
        self._stale.update(self._planned)

    def _renew_mean(self, slot: int, blocks: int) -> None:
        """The mean value from what DRAM holds of a sequence's first blocks."""
        self._stale.discard(slot)
        ids = torch.tensor(self.table.owned.get(slot, [])[:blocks], dtype=torch.long)
        self.far.settle()
        for layer, shape in self.opening.layers.items():
            values = self.stored.blocks_of(layer).read(ids, shape.dtype).to(shape.device)
            self.means.set(layer, slot, values.transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim))

    def run(self, layer: int, slot: int, step: Step) -> Run:
        """Everything that is stored, keys decoded where that is all there is of them."""
        (near, far), device = self.listing(step), self.opening.layers[layer].device
        assert near is not None
        assert far is not None
        k, v = self._read(layer, torch.tensor(far.ids[0], dtype=torch.long))
        places = torch.arange(near.tokens[0])
        ids = torch.tensor(near.ids[0], dtype=torch.long)[places // self.block]
        recent = read_rows(self.window[layer], ids.to(device), (places % self.block).to(device))
        return Run(torch.cat([k, recent[0]]), torch.cat([v, recent[1]]), 0, None)

    def scores(self, layer: int, q: Tensor, scale: float, step: Step, top: Tensor | None = None) -> Tensor:
        shape = self.opening.layers[layer]
        table, tokens = self._listed(layer, step)
        book = self.books.made[layer] if self.split else None
        return score_pq(q, self.codes[layer], table, tokens, book, self.code_bits, scale, shape.softcap, top)

    def far_tokens(self, layer: int, step: Step) -> Tensor:
        return self._listed(layer, step)[1]

    def _listed(self, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        """Far blocks and entries of each sequence, on the layer's device."""
        device = self.opening.layers[layer].device

        far = self.view(layer, step).far
        assert far is not None
        return far.table[:, 0].contiguous().to(device), far.tokens[:, 0].contiguous().to(device)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Blocks that are among the newest again come back; of keys that are not kept, what their codes say."""
        newest = -(-length // self.block)
        back = [b for b in range(self._first_near(keep), -(-keep // self.block)) if b < newest - self.ring]
        for layer, shape in self.opening.layers.items():
            for b in back:
                if b < self.sinks:
                    self.window[layer][self._near_id(slot, b)].copy_(self.window[layer][self._sink_id(slot, b)])
                    continue
                k, v = self._read(layer, torch.tensor(self.table.owned[slot][b : b + 1]))
                ids = torch.full((self.block,), self._near_id(slot, b), device=shape.device)
                write_rows(self.window[layer], ids, torch.arange(self.block, device=shape.device), k, v)
        self._renew_mean(slot, keep // self.block)
        for table in (self.table, self.code_table):
            table.shrink(slot, keep // self.block)

    def cost(self, tokens: int) -> dict[Tier, int]:
        blocks = tokens // self.block
        return {"gpu": blocks * self.codes.block_bytes, "host": blocks * self.stored.block_bytes}

    def vacant(self) -> dict[Tier, int | None]:
        found: dict[Tier, int | None] = {}
        for tier, table in (("gpu", self.code_table), ("host", self.table)):
            free = table.free()
            found[tier] = None if free is None else free * table.memory.block_bytes  # type: ignore[index]
        return found

    def took(self, layer: int, entries: float) -> None:
        self._taken[layer] = entries

    def attended(self, step: Step) -> tuple[float, float]:
        """In tokens of K and V: codes and values count by their bytes."""
        near, far = super().attended(step)
        if self.counts is not None:
            self._taken.update(self.counts())
        whole, layers = self.window.block_bytes, len(self.opening.layers)
        read = sum(self._taken.get(layer, 0.0) for layer in self.opening.layers) / layers
        return near + far * self.codes.block_bytes / whole, read * self.stored.block_bytes / whole

    def notes(self, step: Step) -> dict[str, Any]:
        """Which share of the tokens in DRAM a KV head attended to in the last step, the mean over heads and layers; and
        what a key's code is: channels of a group (0: exact keys), centroids."""
        self.attended(step)
        _, far = super().attended(step)
        taken = sum(self._taken.get(layer, 0.0) for layer in self.opening.layers) / len(self.opening.layers)
        books, shape = self.books, next(iter(self.opening.layers.values()))
        width = shape.head_dim // books.groups if books.groups else 0
        code = {"group_width": width, "code_centroids": books.count if width else 0}
        return code | ({"kept_mean": taken / far} if far else {})

    def lists(self) -> float:
        layers = self.opening.layers.items()
        return sum(4 * self._taken.get(i, 0.0) * (s.kv_heads + s.q_heads) for i, s in layers)

    def fill_randomly(self) -> None:
        self.window.fill_randomly()
        self.stored.fill_randomly()
        self.books.fill_randomly()
        for layer in self.opening.layers:
            memory = self.codes[layer]
            few = self.books.random(layer, (min(len(memory), 512), *memory.shape[1:3]))
            for part in torch.split(memory, max(1, len(few))):
                part.copy_(few[: len(part)])

    def release(self) -> None:
        super().release()
        self.code_table.release()
        self.opening.ledger.give("gpu", self.books.bytes + Means.bytes(self.opening.layers, self.opening.seqs))
        self.means = Means({}, 0, 1)
        self.books = Books({}, 0, 0, True, 16)
        self.counts = None
        self._taken.clear()

    def _groups(self, opening: Opening) -> int:
        return next(iter(opening.layers.values())).head_dim // 2 if self.groups is None else self.groups

    def _books(self, opening: Opening, path: str | None = None, fixed: bool = False) -> Books:
        count, shared = self.centroids or CENTROIDS, self.shared is not False
        rounded, turned = self.centroid_bits == 8, self._turned
        return Books(opening.layers, self._groups(opening), count, shared, self.code_bits, path, rounded, turned, fixed)

    def _spill(self, layer: int, slot: int, first: int, k: Tensor, v: Tensor) -> None:
        for b in range(first, min(self.sinks, first + len(k) // self.block)):
            own = slice((b - first) * self.block, (b - first + 1) * self.block)
            copy = torch.stack([k[own].transpose(0, 1), v[own].transpose(0, 1)], 1)
            self.window[layer][self._sink_id(slot, b)].copy_(copy)
        self.means.add(layer, slot, v)
        self._store(layer, self.table.owned[slot][first : first + len(k) // self.block], k, v)

    def _store(self, layer: int, ids: list[int], k: Tensor, v: Tensor) -> None:
        """Whole blocks of k, v `[len(ids) * block, kv_heads, d]`: values to DRAM, codes into GPU memory."""
        kept = self._blocked(self.books.encode(layer, k))
        self.codes[layer][torch.tensor(ids, device=kept.device)] = kept.to(self.codes[layer].dtype)
        values = self._blocked(v)
        if self.values != "model":
            made = pack_values(values, self.values)
        else:
            planes = (self._blocked(k), values) if self.keep_keys else (values,)
            made = torch.stack(planes, 2).to(self.stored[layer].dtype)
        self._write(layer, ids, made)

    def _write(self, layer: int, ids: list[int], made: Tensor) -> None:
        """Blocks to DRAM; from a GPU beside what it does next, as in `_write_through`."""
        memory = self.stored[layer]
        if made.device.type == "cpu":
            memory[torch.tensor(ids)] = made
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(made.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(made.device))
        with torch.cuda.stream(self._stream):
            for start, end in runs(ids):
                memory[ids[start] : ids[end - 1] + 1].copy_(made[start:end], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        made.record_stream(self._stream)
        self.far.arriving[layer] = event

    def _spill_by_kernels(self, layer: int, near: Tensor, ids: Tensor, spill: Tensor) -> None:
        """Blocks that the step has filled, by kernels that do nothing for those that are not full."""
        from coattn.ops.triton.nearest import code_spilled
        from coattn.ops.triton.spill import spill_keys, spill_values

        values = self.stored.blocks_of(layer).memory
        halves = values if self.values == "model" else values.view(torch.float16)
        sums = self.means.sums[layer]
        spill_values(near, values, halves, ids, spill, LEVELS.get(self.values, 0), sums, self.ring)
        if self.split:
            code_spilled(near, self.codes[layer], ids, spill, self.books.made[layer], self.code_bits)
        else:
            spill_keys(near, self.codes[layer], ids, spill)

    def _blocked(self, x: Tensor) -> Tensor:
        """`[n * block, kv_heads, w]` -> `[n, kv_heads, block, w]`."""
        return x.reshape(-1, self.block, *x.shape[1:]).transpose(1, 2)

    def _read(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of whole far blocks, on the layer's device."""
        self.far.settle()
        shape = self.opening.layers[layer]
        values = self.stored.blocks_of(layer).read(ids, shape.dtype).to(shape.device)
        if self.keep_keys:
            keys = self.stored.keys(layer)[ids].to(shape.device).transpose(1, 2)
        else:
            keys = self.books.decode(layer, self.codes[layer][ids.to(shape.device)].transpose(1, 2))
        k, v = (x.reshape(-1, shape.kv_heads, shape.head_dim) for x in (keys, values.transpose(1, 2)))
        return k, v
