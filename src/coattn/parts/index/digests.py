"""Digests: a few numbers per block and KV head that say what a query could find in the block (Quest, section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.observer import Filled
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import StepTable
from coattn.kernels.digest import Scores, digest, score_blocks, score_parts
from coattn.kernels.lists import Rows
from coattn.kernels.upload import upload
from coattn.part import check_number
from coattn.parts.index.base import Index
from coattn.types import BlockList


@dataclass
class Digests(Index):
    """The lowest and highest of every channel of a full block's keys: as much as one token a block.

    Owner and writer: this index, or maintenance that brings blocks in, when a block has become full. Reader: the rule,
    from the next step on.
    """

    name = "digests"
    needs = frozenset({"whole_kv"})
    provides = frozenset({"digests"})
    resumes = True
    beside = True
    help_text = {
        "slack": "how far from the middle of a digest's range to its best end a score goes: 1 is a bound, 0 the middle",
    }

    slack: float = 1.0
    memory: BlockMemory = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("slack", self.slack, 0, 1)

    def side(self, spec: CacheSpec, config: CacheConfig) -> BlockMemory:
        # a step's kernels write the digest of a block that is not full to the padding
        padding = max(spec.padding, int(spec.device.type == "cuda" and config.host is not None))
        what = "Keeping every token, with digests,"
        self.memory = BlockMemory("gpu", spec.layers, 1, spec.ledger, what, padding=padding)
        return self.memory

    def of(self, layer: int) -> Tensor:
        """`[blocks, kv_heads, 2, head_dim]`"""
        return self.memory[layer][:, :, :, 0]

    def update(self, layer: int, filled: Sequence[Filled], table: StepTable | None) -> None:
        digests, gpu = self.of(layer), self.cache.gpu.memory[layer]
        for part in filled:
            keys = part.k.view(len(part.ids), self.cache.block, *part.k.shape[1:]).transpose(1, 2)
            digests[upload(part.ids, keys.device)] = digest(keys)
        if table is None:
            return
        block, to = table.write_block.long(), table.flush_to
        if to is None:
            # of every filling block: what is written before a block is full is written again before it is read
            digests[block] = digest(gpu[block][:, :, 0])
        elif gpu.device.type == "cuda":
            digests[to.long().where(to >= 0, len(digests) - 1)] = digest(gpu[block][:, :, 0])
        else:
            full = to >= 0
            digests[to.long()[full]] = digest(gpu[block[full]][:, :, 0])

    def scores(self, layer: int, q: Tensor, rows: Rows, scale: float) -> Scores:
        """q `[rows, q_heads, d]` against the blocks in DRAM that a decode step may pick from."""
        softcap = self.cache.spec.layers[layer].softcap
        table, tokens = rows.host_blocks, rows.host_lens
        return score_parts(q, self.of(layer), table, tokens, self.cache.block, scale, softcap, self.slack)

    def listed_scores(self, layer: int, q: Tensor, listed: BlockList, scale: float, sinks: int) -> Tensor:
        """q against any listed blocks -> float32 `[seqs, kv_heads, n]`; see `score_blocks`."""
        softcap = self.cache.spec.layers[layer].softcap
        return score_blocks(q, self.of(layer), listed, self.cache.block, scale, softcap, self.slack, sinks)
