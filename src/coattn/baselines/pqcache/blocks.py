"""PQCache's cache of blocks on the GPU: those of whose tokens most are chosen, the least frequently used out first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.recall import recall

NOTHING = -1
"""A place without a block, a token that is not there."""
TIES = 1 << 32
"""Of how often a block was used and when, which decides first."""


@dataclass
class HotBlocks:
    """Of one layer, for each sequence and all its KV heads: copies of blocks of `per` blocks in DRAM each.

    Owner: the index. Writer: `renew`, after the layer has attended. Reader: the rule, and attention, a step later.
    """

    memory: Tensor
    """`[seqs * places * per, kv_heads, 2, block, d]`"""
    held: Tensor
    """`[seqs + 1, places]` int64: the block of the sequence that a place holds, or NOTHING. The last: padding rows."""
    uses: Tensor
    """The same shape: in how many steps it was among the most chosen since it came."""
    last: Tensor
    """The same shape: the last such step."""
    clock: Tensor
    """`[seqs + 1]` int64: steps."""
    per: int

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.per * self.memory.shape[3]

    def find(self, seq: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[rows, kv_heads, k]` -> whether each is here, and its place in `token_memory(self.memory)`."""
        held = self.held[seq.long()]
        same = (tokens // self.size)[..., None] == held[:, None, None]
        place = seq.long()[:, None, None] * held.shape[1] + same.to(torch.uint8).argmax(-1)
        heads, block = self.memory.shape[1], self.memory.shape[3]
        at = place * self.per + tokens % self.size // block
        return same.any(-1), (at * (2 * heads * block) + tokens % block).to(torch.int32)

    def renew(self, host: Tensor, table: Tensor, lens: Tensor, seq: Tensor, tokens: Tensor, chosen: Tensor) -> None:
        """A step has chosen `tokens` `[rows, kv_heads, k]` where `chosen`: their blocks are used, or come.

        As many blocks as there are places, those with most chosen tokens over the KV heads; only whole ones. What is
        here counts one use more; what is not takes the places that were used least often, then longest ago.
        host: the layer's blocks in DRAM; table `[rows, blocks]`: those of each sequence; lens `[rows]`: tokens there.
        """
        seq, places = seq.long(), self.held.shape[1]
        whole = torch.arange(max(1, table.shape[1] // self.per), device=seq.device)
        counts = torch.zeros(len(seq), len(whole) + 1, dtype=torch.int64, device=seq.device)
        block = (tokens // self.size).clamp(max=len(whole)).flatten(1)
        counts.scatter_add_(1, block, chosen.flatten(1).long())
        counts = counts[:, :-1].masked_fill((whole + 1) * self.size > lens[:, None], 0)
        most = counts.sort(dim=-1, descending=True, stable=True)
        wanted, there = most.indices[:, :places], most.values[:, :places] > 0
        held, clock = self.held[seq], self.clock[seq] + 1
        same = (wanted[..., None] == held[:, None]) & there[..., None]
        hit, used = same.any(-1), same.any(1)
        uses, last = self.uses[seq] + used, torch.where(used, clock[:, None], self.last[seq])
        rank = (
            (uses * TIES + last).masked_fill(held == NOTHING, NOTHING).masked_fill(used, torch.iinfo(torch.int64).max)
        )
        coming = there & ~hit
        turn = (coming.cumsum(-1) - 1).clamp(min=0)
        to = rank.argsort(dim=-1, stable=True).gather(1, turn)  # never a place that was used: there are enough others
        self._take(held, to, coming, wanted)
        self._take(uses, to, coming, torch.ones_like(wanted))
        self._take(last, to, coming, clock[:, None].expand_as(wanted))
        self.held[seq], self.uses[seq], self.last[seq], self.clock[seq] = held, uses, last, clock
        part = torch.arange(self.per, device=seq.device)
        into = ((seq[:, None] * places + to)[..., None] * self.per + part).masked_fill(~coming[..., None], NOTHING)
        source = table.long().gather(1, (wanted[..., None] * self.per + part).flatten(1).clamp(max=table.shape[1] - 1))
        heads = self.memory.shape[1]
        lists = (x.flatten(1)[:, None].expand(-1, heads, -1).to(torch.int32).contiguous() for x in (into, source))
        recall(self.memory, host, *lists)

    @staticmethod
    def _take(values: Tensor, to: Tensor, coming: Tensor, new: Tensor) -> None:
        """Where blocks come, their places get new values."""
        spare = torch.cat([values, values[:, :1]], 1)
        spare.scatter_(1, to.where(coming, values.shape[1]), new)
        values.copy_(spare[:, :-1])

    def forget(self, slot: int) -> None:
        """A sequence has lost tokens, or begins anew."""
        self.held[slot], self.uses[slot], self.last[slot] = NOTHING, 0, 0
