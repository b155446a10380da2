"""Codes of keys (HCAttention, section 3.1): a key as a few small numbers, by which every query scores every token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.flush import flush_keys, sum_values
from coattn.kernels.quantise.file import Origin, read_origin
from coattn.kernels.quantise.pack import BITS, packed_bytes
from coattn.kernels.score_pq import score_pq
from coattn.kernels.upload import upload
from coattn.part import check_count
from coattn.parts.index.base import BookedIndex, KeyMemory
from coattn.parts.index.codes.books import Books
from coattn.parts.index.codes.means import Means
from coattn.types import Phase, Step

CENTROIDS = 8192


@dataclass
class Codes(BookedIndex):
    """Of every full block in DRAM: its keys as product-quantised codes, and the sum of its values.

    Owner and writer: this index, when a block has become full. Reader: the rule, from the next step on.
    """

    name = "codes"
    needs = frozenset({"host_values"})
    provides = frozenset({"codes"})
    resumes = True
    beside = True
    books_what = "A codebook for each layer, and the mean value of each sequence"
    help_text = {
        "groups": "pieces of a key, each a code; 0: exact keys; unset: as in the codebook, or half the head size",
        "centroids": "centroids of a codebook; unset: as in the codebook, or 8,192",
        "code_bits": "bits of a stored code: 16, or packed at 12 or 13",
        "codebook": "file that `coattn calibrate hcattention` wrote; unset: made from the first keys that are coded",
    }

    groups: int | None = None
    centroids: int | None = None
    code_bits: int = 16
    codebook: str | None = None
    books: Books = field(init=False, repr=False)
    means: Means = field(init=False, repr=False)
    memory: KeyMemory = field(init=False, repr=False)
    _rotated: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        check_count("groups", self.groups, 0, unset=True)
        if self.codebook is not None:
            self._agree(read_origin(self.codebook))
        check_count("centroids", CENTROIDS if self.centroids is None else self.centroids, 2)
        if isinstance(self.code_bits, float) or self.code_bits not in BITS:
            raise ConfigError(f"code_bits is {self.code_bits!r}, but must be 12, 13 or 16.", "Leave it out for 16.")
        most = 1 << min(self.code_bits, 15)
        if self.groups != 0 and (self.centroids or CENTROIDS) > most:
            raise ConfigError(
                f"{self.centroids or CENTROIDS:,} centroids do not fit in codes of {self.code_bits} bits.",
                f"Set centroids={most} or less, or more code_bits.",
            )

    def _agree(self, origin: Origin) -> None:
        for name in ("groups", "centroids"):
            own, given = getattr(self, name), getattr(origin, name)
            if own is not None and own != given:
                raise ConfigError(
                    f"{name} is {own!r}, but the codebook {self.codebook} has {given!r}.", f"Leave {name} out."
                )
            setattr(self, name, given)
        self._rotated = origin.basis

    def is_exact(self) -> bool:
        return self.groups == 0

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"groups": 0, "codebook": None}

    def learns(self) -> bool:
        return bool(self.books.groups) and len(self.books.ready) < len(self.books.layers)

    def gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        return self._books(spec).bytes + Means.bytes(spec.layers, spec.seqs)

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        groups = self._groups(spec)
        for shape in spec.layers.values():
            if groups and shape.head_dim % groups:
                raise ConfigError(
                    f"groups is {groups}, which does not divide the head size {shape.head_dim}.",
                    f"Set groups={shape.head_dim // 2} or {shape.head_dim // 4}.",
                )
        if not groups:  # the keys themselves
            width, dtype = spec.shape.head_dim, None
        elif self.code_bits == 16:
            width, dtype = groups, torch.int16
        else:
            width, dtype = packed_bytes(groups, self.code_bits), torch.uint8
        self.memory = KeyMemory(spec, config.block, "Coding every key", width, dtype)
        return self.memory

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        self.books = self._books(cache.spec, self.codebook, cache.spec.fixed)
        self.means = Means(cache.spec.layers, cache.spec.seqs)

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        kept = self.memory[layer]
        for part in filled:
            self.means.add(layer, part.slot, part.v)
            self._store(layer, part.ids, part.k)
        if table is None:
            return
        gpu, block, to = self.cache.gpu.memory[layer], table.write_block, table.column("flush_to")
        sum_values(gpu, self.means.sums[layer], block, to, table.seq)
        if not self.books.groups:
            flush_keys(gpu, kept, block, to)
        elif gpu.device.type != "cuda":
            for own, number in zip(block.tolist(), to.tolist(), strict=True):
                if number >= 0:
                    self._store(layer, [number], gpu[own, :, 0].transpose(0, 1))
        elif layer in self.books.made:
            from coattn.kernels.triton.nearest import code_flushed

            code_flushed(gpu, kept, block, to, self.books.made[layer], self.code_bits)

    def commit(self, step: Step) -> None:
        """A block that became full on a GPU before there was a codebook makes one, before anybody reads its codes."""
        if step.phase is not Phase.DECODE or not self.books.groups or len(self.books.ready) == len(self.books.layers):
            return
        cache = self.cache
        for slot, length in zip(step.slots, step.lengths, strict=True):
            if length % cache.block == 0:
                b = length // cache.block - 1
                for layer in cache.spec.layers:
                    keys = cache.gpu.memory[layer][cache.gpu.place(slot, length - 1)[0], :, 0].transpose(0, 1)
                    self._store(layer, [cache.dram.table.owned[slot][b]], keys)

    def truncate(self, slot: int, keep: int) -> None:
        blocks, prompts = keep // self.cache.block, self.cache.prompts
        if prompts is not None:
            blocks = prompts.known(slot, blocks)
        self.means.recount(self.cache, slot, blocks)

    def scores(self, layer: int, q: Tensor, table: StepTable, scale: float, top: Tensor | None = None) -> Tensor:
        """q `[rows, q_heads, d]` against all that a decode step may attend to in DRAM.

        -> `[rows, kv_heads, group, n]` float32, scaled and soft-capped; past a sequence's end see
        `kernels/score_pq.py`, as for `top`.
        """
        softcap = self.cache.spec.layers[layer].softcap
        book = self.books.made[layer] if self.books.groups else None
        blocks, lens = table.column("host_blocks"), table.column("host_lens")
        return score_pq(q, self.memory[layer], blocks, lens, book, self.code_bits, scale, softcap, top)

    def keys(self, layer: int, ids: Tensor) -> Tensor:
        """Keys of blocks as far as their codes tell: `[blocks, kv_heads, block, head_dim]`."""
        kept = self.memory[layer]
        return self.books.decode(layer, kept[ids.to(kept.device)].transpose(1, 2)).transpose(1, 2)

    def report(self, step: Step) -> dict[str, Any]:
        """What a key's code is: channels of a group (0: exact keys), centroids; and its bytes of a token's."""
        books = self.books
        width = self.cache.spec.shape.head_dim // books.groups if books.groups else 0
        whole = self.cache.spec.block_bytes(self.cache.block)
        return {
            "group_width": width,
            "code_centroids": books.count if width else 0,
            "code_share": self.memory.block_bytes / whole,
        }

    def release(self) -> None:
        super().release()
        self.means, self.books = Means({}, 0), Books({}, 0, 0, 16)

    def _groups(self, spec: CacheSpec) -> int:
        return spec.shape.head_dim // 2 if self.groups is None else self.groups

    def _books(self, spec: CacheSpec, path: str | None = None, fixed: bool = False) -> Books:
        count = self.centroids or CENTROIDS
        return Books(spec.layers, self._groups(spec), count, self.code_bits, path, self._rotated, fixed)

    def _store(self, layer: int, ids: list[int], k: Tensor) -> None:
        """Codes of whole blocks of keys `[len(ids) * block, kv_heads, d]`."""
        kept = self.memory[layer]
        made = self.books.encode(layer, k)
        made = made.reshape(len(ids), self.cache.block, *made.shape[1:]).transpose(1, 2)
        kept[upload(ids, kept.device)] = made.to(kept.device, kept.dtype)
