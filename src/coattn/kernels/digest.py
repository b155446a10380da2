"""Digests of blocks of keys, and what they promise a query (Quest: Tang et al., 2024, section 3.3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.softcap import softcap as capped
from coattn.types import BlockList

CHUNK = 64
"""Blocks whose scores are summed up together."""


def digest(keys: Tensor) -> Tensor:
    """keys `[blocks, kv_heads, block, d]` -> `[blocks, kv_heads, 2, d]`: the lowest and highest of every channel."""
    return torch.stack([keys.amin(2), keys.amax(2)], 2)


def score_digest(q: Tensor, digests: Tensor, table: Tensor, slack: float) -> Tensor:
    """q `[seqs, q_heads, d]` and the digests `[n, kv_heads, 2, d]` listed in table `[seqs, m]` -> float32
    `[seqs, kv_heads, group, m]`: about the most that the product with a key of the block can be.

    Of every channel it takes the middle between lowest and highest, and `slack` of the way from there to whichever is
    better for the query: slack 1 is the sum over channels of max(q * low, q * high), Quest's bound. Either way it is
    one product with each of the two. Ids in the table must be valid. Cost: copies the listed digests.
    """
    listed = digests[table.long()].to(torch.float32)  # [seqs, m, kv_heads, 2, d]
    grouped = q.to(torch.float32).view(len(q), digests.shape[1], -1, q.shape[-1])
    swing = slack * grouped.abs()
    low = torch.einsum("shgd,smhd->shgm", (grouped - swing) / 2, listed[:, :, :, 0])
    return low + torch.einsum("shgd,smhd->shgm", (grouped + swing) / 2, listed[:, :, :, 1])


class Scores(NamedTuple):
    """What the digests promise each query head."""

    blocks: Tensor
    """float32 `[seqs, kv_heads, group, n]`, scaled and soft-capped; anything where a sequence has no block."""
    sums: Tensor
    """float32 `[seqs, kv_heads, group, chunks]`: the log-sum-exp of each CHUNK of them."""

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def of_heads(self, there: Tensor, sinks: int) -> Tensor:
        """How much each KV head wants each block, `[seqs, kv_heads, n]`; -inf where none is `there`.

        A query head's score as a softmax over the blocks is the share of the attention that could lie there. A KV
        head's is the log of the sum over its query heads, so that a head with large queries does not speak for the
        others. The first `sinks` blocks get the highest score there is.
        """
        values = (self.blocks - self.sums.logsumexp(-1, keepdim=True)).logsumexp(2)
        values[..., :sinks] = torch.finfo(values.dtype).max
        # a sequence without full blocks has a softmax over nothing, which is no number
        return values.masked_fill(~there, -torch.inf)


@Operation
def score_parts(
    q: Tensor,
    digests: Tensor,
    table: Tensor,
    tokens: Tensor,
    block: int,
    scale: float,
    softcap: float | None,
    slack: float,
) -> Scores:
    """q `[seqs, q_heads, d]`, digests `[b, kv_heads, 2, d]`, table `[seqs, n]`, tokens `[seqs]` of full blocks, int32.

    On a GPU blocks that a sequence does not have are neither read nor written.
    """
    there = torch.arange(table.shape[1], device=q.device) < tokens[:, None] // block
    scores = capped(score_digest(q, digests, table.where(there, 0), slack) * scale, softcap)
    scores = scores.masked_fill(~there[:, None, None], -torch.inf)
    width = -(-table.shape[1] // CHUNK) * CHUNK
    padded = torch.nn.functional.pad(scores, (0, width - table.shape[1]), value=-torch.inf)
    return Scores(scores, padded.view(*scores.shape[:-1], -1, CHUNK).logsumexp(-1))


def score_blocks(
    q: Tensor,
    digests: Tensor,
    listed: BlockList,
    block: int,
    scale: float,
    softcap: float | None,
    slack: float,
    sinks: int = 0,
) -> Tensor:
    """See `Scores.of_heads`: q `[seqs, q_heads, d]`, listed `[seqs, 1, n]`; -inf for what is not listed or not full."""
    table, tokens = listed.table[:, 0], listed.tokens[:, 0].contiguous()
    there = torch.arange(table.shape[-1], device=q.device) < listed.tokens // block
    scores = score_parts(q, digests, table, tokens, block, scale, softcap, slack)
    return scores.of_heads(there[:, None], sinks)
