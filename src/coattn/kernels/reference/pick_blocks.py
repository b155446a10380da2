"""The best blocks of each KV head, and which of them are resident."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.reference.digest import score_digest

CHUNK = 64
"""Blocks whose scores are summed up together."""


class Scores(NamedTuple):
    """What the digests promise each query head."""

    blocks: Tensor
    """float32 `[seqs, kv_heads, group, n]`, scaled and soft-capped; anything where a sequence has no block."""
    sums: Tensor
    """float32 `[seqs, kv_heads, group, chunks]`: the log-sum-exp of each CHUNK of them."""


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
    """q `[seqs, q_heads, d]`, digests `[b, kv_heads, 2, d]`, table `[seqs, n]`, tokens `[seqs]` of full blocks."""
    there = torch.arange(table.shape[1], device=q.device) < tokens[:, None] // block
    scores = score_digest(q, digests, table.where(there, 0), slack) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~there[:, None, None], -torch.inf)
    width = -(-table.shape[1] // CHUNK) * CHUNK
    padded = torch.nn.functional.pad(scores, (0, width - table.shape[1]), value=-torch.inf)
    return Scores(scores, padded.view(*scores.shape[:-1], -1, CHUNK).logsumexp(-1))


def pick_blocks(scores: Scores, rows: Rows, pool: Residents, lists: Lists) -> None:
    """A KV head's score of a block is the log of the sum, over its query heads, of their softmax over the blocks; it
    picks its first `pool.sinks` blocks and as many of the highest as `lists.chosen` has room for. Of equal ones the
    older.

    Near is every resident block, whether picked or not.
    """
    seqs, heads, _, n = scores.blocks.shape
    count, block = lists.chosen.shape[-1], pool.block
    blocks = (rows.host_lens // block)[:, None, None]
    there = torch.arange(n, device=rows.host_blocks.device) < blocks
    logs = scores.blocks - scores.sums.logsumexp(-1, keepdim=True)
    values = logs.logsumexp(2)
    values[..., : pool.sinks] = torch.finfo(values.dtype).max
    values = values.masked_fill(~there, -torch.inf)
    order = (
        values.sort(dim=-1, descending=True, stable=True)
        .indices[..., :count]
        .masked_fill(torch.arange(min(count, n), device=values.device) >= blocks, n)
    )
    chosen = order.sort(-1).values
    real = chosen < n
    number = chosen.where(real, 0)
    held = pool.held[rows.seq.long()]
    match = (number[..., None] == held[..., None, :]) & real[..., None]
    resident = match.any(-1)
    missing = real & ~resident
    ids = rows.host_blocks[:, None].expand(-1, heads, -1).gather(2, number)
    _write(lists.chosen[:seqs], number.int(), real)
    _write(lists.host[:seqs], ids, missing)
    lists.host_lens[:seqs] = (missing.sum(-1) * block).int()
    places = held.shape[-1]
    present = (held >= 0) & (held < blocks)
    place = torch.arange(places, device=held.device).expand_as(held)
    at = pool.first + rows.seq.long()[:, None, None] * places + place
    window = rows.gpu_blocks[:, None].expand(-1, heads, -1)
    some = torch.arange(window.shape[-1], device=at.device) * block < rows.gpu_lens[:, None, None]
    _write(lists.gpu[:seqs], torch.cat([at, window], -1).int(), torch.cat([present, some.expand_as(window)], -1))
    lists.gpu_lens[:seqs] = present.sum(-1) * block + rows.gpu_lens[:, None]
    lists.wanted[:seqs] = -torch.inf
    lists.wanted[:seqs, :, : number.shape[-1]] = values.gather(-1, number).masked_fill(~missing, -torch.inf)
    worth = values.gather(-1, held.long().clamp(0, n - 1)).masked_fill(~present, -torch.inf)
    lists.worth[:seqs] = worth.masked_fill(match.any(-2), torch.inf)


def _write(out: Tensor, values: Tensor, wanted: Tensor) -> None:
    """The wanted ones of values `[.., m]`, in order, to the front of out `[.., at least as many]`; the rest stays."""
    kept = wanted.nonzero(as_tuple=True)
    place = (wanted.cumsum(-1) - 1)[kept]
    out[kept[0], kept[1], place] = values[kept].to(out.dtype).to(out.device)
