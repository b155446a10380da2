"""`renew`: a pool's residents after a layer's attention: misses come in, full blocks of the window too."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.digest import digest
from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.operation import Operation
from coattn.kernels.recall import recall


class Due(NamedTuple):
    """A sequence is due when its length and `shift` together are a multiple of `interval`; 0: never."""

    interval: int
    shift: int


@Operation
def renew(
    gpu: Tensor, host: Tensor, digests: Tensor, rows: Rows, pool: Residents, lists: Lists, due: Due, moved: Tensor
) -> None:
    """Where a sequence is due, the best missed blocks take the places of residents with lower scores, the lowest first.

    Then a block that is full now gets its digest, and an empty place where there is one. moved: `[1]` int64, to
    which the blocks that were brought from the arena are added.
    """
    seqs, slots, places = len(rows.seq), rows.seq.long(), pool.held.shape[-1]
    held = pool.held[slots]
    home = (pool.first + slots[:, None, None] * places + torch.arange(places, device=gpu.device)).expand_as(held)
    length = rows.host_lens + rows.gpu_lens
    if due.interval:
        wanted, order = lists.wanted[:seqs].sort(dim=-1, descending=True, stable=True)
        worth, place = lists.worth[:seqs].sort(dim=-1, stable=True)
        some = min(wanted.shape[-1], places)
        wanted, order, worth, place = (x[..., :some] for x in (wanted, order, worth, place))
        take = (wanted > worth) & ((length + due.shift) % due.interval == 0)[:, None, None]
        number = lists.chosen[:seqs].gather(-1, order).where(take, 0)
        source = rows.host_blocks[:, None].expand(-1, held.shape[1], -1).gather(2, number.long())
        recall.reference(gpu, host, home.gather(-1, place).where(take, -1), source)
        held = held.scatter(-1, place, number.where(take, held.gather(-1, place)))
        moved += take.sum()
    full = rows.flush_to >= 0
    ids = rows.write_block.long()[full]
    digests[rows.flush_to.long()[full]] = digest(gpu[ids][:, :, 0])
    empty = held == -1
    place = empty.int().argmax(-1, keepdim=True)
    take = empty.any(-1, keepdim=True) & full[:, None, None]
    number = (length // pool.block - 1)[:, None, None].int().where(take, held.gather(-1, place))
    held = held.scatter(-1, place, number)
    recall.reference(gpu, gpu, home.gather(-1, place).where(take, -1), rows.write_block[:, None, None].expand_as(place))
    somebody = slots != len(pool.held) - 1
    pool.held[slots[somebody]] = held[somebody]
