"""Chosen entries between two who attend: so many a KV head stay, the others go into a list of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from coattn.ops.attend_scored import Chosen
from coattn.units import ceil_div


def deal(chosen: Chosen, stay: Tensor, index: Tensor, count: Tensor) -> None:
    """Moves the last entries of each piece, where it has more than its part of `stay` `[1]` int32, into a list.

    index `[rows, kv_heads, most]`, count `[rows, kv_heads]` int32: where the list and its length go; memory of the host
    that the device reaches will do. What the list has no room for stays. Entries that go come into the pool later.
    """
    if chosen.ids.device.type == "cuda":
        from coattn.ops.triton.deal import deal as kernel

        kernel(chosen, stay, index, count)
        return
    rows, kv_heads, splits, _ = chosen.count.shape
    quota, most = ceil_div(int(stay), splits), index.shape[-1]
    for row in range(rows):
        each = ceil_div(ceil_div(int(chosen.tokens[row]), chosen.look), splits) * chosen.look
        for head in range(kv_heads):
            taken = 0
            for split in range(splits):
                found, later = chosen.count[row, head, split, :2].tolist()
                more = min(max(found - quota, 0), most - taken)
                first = split * each + found - more
                moved = chosen.ids[row, head, first : first + more]
                index[row, head, taken : taken + more] = moved
                room = min(more, chosen.later.shape[-1] - later)
                chosen.later[row, head, split, later : later + room] = moved[:room]
                chosen.count[row, head, split, :2] = torch.tensor([found - more, later + room])
                taken += more
            count[row, head] = taken


def room(like: Chosen, most: int) -> tuple[Tensor, Tensor]:
    """Lists of at most `most` entries beside the chosen ones."""
    rows, kv_heads = like.count.shape[:2]
    index = torch.empty(rows, kv_heads, most, dtype=torch.int32, device=like.ids.device)
    return index, torch.empty(rows, kv_heads, dtype=torch.int32, device=like.ids.device)
