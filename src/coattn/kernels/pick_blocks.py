"""`pick_blocks`: the best blocks of each KV head, and which of them are resident."""

import torch
from torch import Tensor

from coattn.kernels.digest import Scores
from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.operation import Operation


@Operation
def pick_blocks(scores: Scores, rows: Rows, pool: Residents, lists: Lists) -> None:
    """A KV head picks its first `pool.sinks` blocks and as many of the highest scores (`Scores.of_heads`) as
    `lists.chosen` has room for, of equal ones the older. Residents that have left the window are all in `lists.gpu`.
    """
    seqs, heads, _, n = scores.blocks.shape
    count, block = lists.chosen.shape[-1], pool.block
    blocks = (rows.host_lens // block)[:, None, None]
    there = torch.arange(n, device=rows.host_blocks.device) < blocks
    values = scores.of_heads(there, pool.sinks)
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
