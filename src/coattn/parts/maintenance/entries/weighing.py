"""How much the queries of a prompt weigh what is stored, and which entries are chosen by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.append import read_rows
from coattn.kernels.read_keys import read_keys
from coattn.kernels.softcap import softcap
from coattn.parts.maintenance.entries.owner import Chosen, EntryOwner

Reduce = Callable[[Tensor], Tensor]


class Weighed(NamedTuple):
    """What entries of a window weigh from now on `[n, kv_heads]`, at block and row `[n]`."""

    layer: int
    ids: Tensor
    rows: Tensor
    made: Tensor


def weights_over(
    q: Tensor, keys: Tensor, scale: float, cap: float | None, reduce: Reduce, hidden: Tensor | None = None
) -> Tensor:
    """Softmax of q `[queries, q_heads, d]` over keys `[kv_heads, n, d]` -> `[kv_heads, n]`.

    reduce: how the weights `[group, queries, n]` of the queries and heads of a KV head become one, `[n]`.
    hidden: `[queries, n]`, what a query may not see.

    Cost: `queries * group * n` scores of one KV head at a time.
    """
    found = []
    grouped = (
        q.float().view(len(q), keys.shape[0], -1, q.shape[-1]).permute(1, 2, 0, 3)
    )  # [kv_heads, group, queries, d]
    for own, rows in zip(grouped, keys, strict=True):
        scores = own * scale @ rows.float().T  # [group, queries, n]
        scores = softcap(scores, cap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        found.append(reduce(scores.softmax(-1)))
    return torch.stack(found)


def weigh_host(choice: Chosen, layer: int) -> Tensor:
    """`[kv_heads, entries]` on the layer's device: the weights of the queries over the blocks that are chosen from; of
    nobody, zero. Reads keys, on the current stream of the device."""
    entries, q = choice.entries, choice.heard.get(layer)
    shape = entries.cache.spec.layers[layer]
    if q is None:
        return torch.zeros(shape.kv_heads, choice.first * entries.block)
    if choice.held is not None and entries.cache.prompts is not None:
        keys = entries.cache.prompts.keys(choice.held, layer, choice.first * entries.block).transpose(0, 1)
    else:
        keys = read_keys(entries.host[layer], choice.ids, shape, entries.block)

    def reduce(weights: Tensor) -> Tensor:
        return weights.amax((0, 1)) if entries.peak else weights.mean(1).amax(0)

    return weights_over(q, keys, entries.scale[layer], shape.softcap, reduce)


def weigh_window(
    entries: EntryOwner, layer: int, slot: int, before: int, length: int, q: Tensor | None, scale: float
) -> Weighed:
    """The queries of the last tokens weigh the window's entries, as decode steps would have. Changes nothing.

    Of the first `before` tokens the moving averages go on; those of newer ones, and of entries whose averages nobody
    knows, start with the mean of the weights. Without queries nothing is known of those: they start with zero.
    """
    shape, gpu = entries.cache.spec.layers[layer], entries.gpu
    first = gpu.first(length) * entries.block
    position = torch.arange(first, length)
    ids, rows = (x.to(shape.device) for x in gpu.places(slot, position))
    values = entries.averages[layer]
    if q is None:
        return Weighed(layer, ids, rows, values[ids, :, rows].clamp_min(0.0))
    q = q[-(length - first) :]  # a query before the window would see nothing of it
    keys, _ = read_rows(gpu.memory[layer], ids, rows)
    asking = torch.arange(length - len(q), length)[:, None]
    hidden = (position > asking).to(shape.device)

    def weigh(reduce: Reduce) -> Tensor:
        return weights_over(q, keys.transpose(0, 1), scale, shape.softcap, reduce, hidden).T

    made = weigh(lambda weights: weights.mean(1).amax(0))
    if before > first:
        alpha = entries.alpha
        share = alpha * (1 - alpha) ** torch.arange(len(q) - 1, -1, -1, device=shape.device, dtype=torch.float32)
        added = weigh(lambda weights: share @ weights.amax(0))
        old, known = (position < before).to(shape.device)[:, None], values[ids, :, rows]
        went_on = (1 - alpha) ** len(q) * known + added
        made = torch.where(old & (known >= 0), went_on, made)
    return Weighed(layer, ids, rows, made)


def addresses(entries: EntryOwner, ids: list[int]) -> Tensor:
    """`[layers, len(ids), kv_heads]`: where the keys of blocks in DRAM begin."""
    memories = [entries.host[layer] for layer in entries.cache.spec.layers]
    base = torch.tensor([memory.data_ptr() for memory in memories])
    block, one = (memories[0].stride(i) * memories[0].element_size() for i in (0, 1))
    heads = torch.arange(entries.cache.spec.shape.kv_heads)
    return base[:, None, None] + torch.tensor(ids)[:, None] * block + heads * one
