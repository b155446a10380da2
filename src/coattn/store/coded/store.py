"""Values of every token in DRAM; of its key a code in GPU memory; the newest blocks there as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.reference.append import read_rows, write_rows
from coattn.ops.score_pq import score_pq
from coattn.part import check_count
from coattn.quantise.file import Origin, read_origin
from coattn.quantise.pack import BITS, packed_bytes
from coattn.store.arena import Arena
from coattn.store.base import Opening, Run
from coattn.store.blocks import BlockMemory, BlockTable
from coattn.store.coded.books import Books
from coattn.store.coded.planes import CodeMemory, ValueMemory
from coattn.store.ledger import Tier
from coattn.types import Step

CENTROIDS = 8192


@dataclass
class Coded(Arena):
    """Values in DRAM, product-quantised key codes in the GPU tier, recent tokens exact (HCAttention, section 3).

    A window of the newest blocks as in an arena. When a block is full its values go to DRAM and its keys become codes;
    both have the same block id. The keys themselves are gone when the block leaves the window, unless kept in DRAM.
    """

    name = "coded"
    provides = frozenset({"near", "weighted", "codes", "values", "all_tokens"})
    help_text = {
        "block": "tokens per block",
        "window_blocks": "newest blocks of a sequence kept as they are in GPU memory; unset: 1",
        "groups": "pieces of a key, each a code; 0: exact keys; unset: as in the codebook, or half the head size",
        "centroids": "centroids of a codebook; unset: as in the codebook, or 8,192",
        "shared": "one codebook for all groups of a layer; unset: as in the codebook, or true",
        "code_bits": "bits of a stored code: 16, or packed at 12 or 13",
        "codebook": "file that `coattn calibrate hcattention` wrote; unset: made from the first keys that are coded",
        "keep_keys": "keep the keys in DRAM too, so that what is selected is scored again exactly",
    }

    groups: int | None = None
    centroids: int | None = None
    shared: bool | None = None
    code_bits: int = 16
    codebook: str | None = None
    keep_keys: bool = False
    books: Books = field(init=False, repr=False)
    _taken: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    """By layer: entries that the last selection took, over its sequences; the mean over KV heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None:
            check_count("groups", self.groups, 0)
        if self.codebook is not None:
            self._agree(read_origin(self.codebook))
        check_count("centroids", CENTROIDS if self.centroids is None else self.centroids, 2)
        if self.code_bits not in BITS:
            raise ConfigError(f"code_bits is {self.code_bits!r}, but must be 12, 13 or 16.", "Leave it out for 16.")
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

    def is_exact(self) -> bool:
        return self.groups == 0 or self.keep_keys

    def keeps_keys(self) -> bool:
        return self.keep_keys

    def least(self, opening: Opening) -> int:
        window = opening.seqs * (self.window_blocks or 1) * opening.block_bytes(self.block)
        blocks = 1 if opening.fixed else opening.seqs * ((opening.tokens or 0) // self.block)
        groups = self._groups(opening)
        codes = sum(
            s.kv_heads * (packed_bytes(groups, self.code_bits) if groups else s.head_dim * s.dtype.itemsize)
            for s in opening.layers.values()
        )
        return window + self._books(opening).bytes + blocks * self.block * codes

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
        what = f"A window of {self.ring} block(s) for {opening.seqs} sequence(s)"
        self.window = BlockMemory("gpu", layers, self.block, ledger, what)
        values = ValueMemory(layers, self.block, ledger, "Keeping every value", with_keys=self.keep_keys)
        codes = CodeMemory(layers, self.block, ledger, "Coding every key", groups=self.split, bits=self.code_bits)
        self.values, self.codes = values, codes
        self.table, self.code_table = BlockTable(values), BlockTable(codes)
        self.books = self._books(opening, self.codebook)
        ledger.take("gpu", self.books.bytes, "A codebook for each layer")
        far = opening.seqs * ((opening.tokens or 0) // self.block)
        for memory, blocks in ((self.window, opening.seqs * self.ring), (values, far), (codes, far)):
            if opening.fixed:
                memory.fix(blocks)
            else:
                memory.reserve(blocks)

    def plan(self, step: Step) -> None:
        wanted = [(slot, n // self.block) for slot, n in zip(step.slots, step.lengths, strict=True)]
        tables = (self.table, self.code_table)
        for table in tables:
            table.require(wanted)
        # the same requests in the same order: a block has the same id in both
        for table in tables:
            for slot, blocks in wanted:
                table.ensure(slot, blocks)

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

    def scores(self, layer: int, q: Tensor, scale: float, step: Step) -> Tensor:
        shape = self.opening.layers[layer]

        def listed() -> tuple[Tensor, Tensor]:
            far = self.view(layer, step).far
            assert far is not None
            return far.table[:, 0].contiguous().to(q.device), far.tokens[:, 0].contiguous().to(q.device)

        table, tokens = self._once(("far", q.device), listed)
        book = self.books.made[layer] if self.split else None
        return score_pq(q, self.codes[layer], table, tokens, book, self.code_bits, scale, shape.softcap)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Blocks that are among the newest again come back; of keys that are not kept, what their codes say."""
        newest = -(-length // self.block)
        back = [b for b in range(self._first_near(keep), -(-keep // self.block)) if b < newest - self.ring]
        for layer, shape in self.opening.layers.items():
            for b in back:
                k, v = self._read(layer, torch.tensor(self.table.owned[slot][b : b + 1]))
                ids = torch.full((self.block,), self._near_id(slot, b), device=shape.device)
                write_rows(self.window[layer], ids, torch.arange(self.block, device=shape.device), k, v)
        for table in (self.table, self.code_table):
            table.shrink(slot, keep // self.block)

    def cost(self, tokens: int) -> dict[Tier, int]:
        blocks = tokens // self.block
        return {"gpu": blocks * self.codes.block_bytes, "host": blocks * self.values.block_bytes}

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
        whole, layers = self.window.block_bytes, len(self.opening.layers)
        read = sum(self._taken.get(layer, 0.0) for layer in self.opening.layers) / layers
        return near + far * self.codes.block_bytes / whole, read * self.values.block_bytes / whole

    def fill_randomly(self) -> None:
        self.window.fill_randomly()
        self.values.fill_randomly()
        self.books.fill_randomly()
        for layer in self.opening.layers:
            memory = self.codes[layer]
            few = self.books.random(layer, (min(len(memory), 256), *memory.shape[1:3]))
            for part in torch.split(memory, max(1, len(few))):
                part.copy_(few[: len(part)])

    def columns(self) -> dict[str, int]:
        raise AttributeError(f"store {self.name!r} cannot be recorded")

    def release(self) -> None:
        super().release()
        self.code_table.release()
        self.opening.ledger.give("gpu", self.books.bytes)
        self.books = Books({}, 0, 0, True, 16)
        self._taken.clear()

    def _groups(self, opening: Opening) -> int:
        return next(iter(opening.layers.values())).head_dim // 2 if self.groups is None else self.groups

    def _books(self, opening: Opening, path: str | None = None) -> Books:
        count, shared = self.centroids or CENTROIDS, self.shared is not False
        return Books(opening.layers, self._groups(opening), count, shared, self.code_bits, path)

    def _spill_one(self, layer: int, slot: int, b: int) -> None:
        block = self.window[layer][self._near_id(slot, b)]
        self._spill(layer, slot, b, block[:, 0].transpose(0, 1), block[:, 1].transpose(0, 1))

    def _spill(self, layer: int, slot: int, first: int, k: Tensor, v: Tensor) -> None:
        ids = torch.tensor(self.table.owned[slot][first : first + len(k) // self.block])
        planes = (k, v) if self.keep_keys else (v,)
        for i, x in enumerate(planes):
            self.values[layer][ids, :, i] = self._blocked(x).to("cpu", self.values[layer].dtype)
        kept = self._blocked(self.books.encode(layer, k))
        self.codes[layer][ids.to(kept.device)] = kept.to(self.codes[layer].dtype)

    def _blocked(self, x: Tensor) -> Tensor:
        """`[n * block, kv_heads, w]` -> `[n, kv_heads, block, w]`."""
        return x.reshape(-1, self.block, *x.shape[1:]).transpose(1, 2)

    def _read(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of whole far blocks, on the layer's device."""
        shape = self.opening.layers[layer]
        values = self.values.values(layer)[ids].to(shape.device)
        if self.keep_keys:
            keys = self.values.keys(layer)[ids].to(shape.device)
        else:
            keys = self.books.decode(layer, self.codes[layer][ids.to(shape.device)])
        k, v = (x.transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim) for x in (keys, values))
        return k, v
