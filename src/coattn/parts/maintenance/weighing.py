"""What queries weigh of stored keys, and where a sequence's keys are."""

from collections.abc import Callable

import torch
from torch import Tensor

from coattn.cache.kv import KVCache
from coattn.kernels.sink_logits import softmax
from coattn.kernels.softcap import softcap
from coattn.types import LayerShape

Reduce = Callable[[Tensor], Tensor]


def weights_over(
    q: Tensor, keys: Tensor, scale: float, shape: LayerShape, reduce: Reduce, hidden: Tensor | None = None
) -> Tensor:
    """Softmax of q `[queries, q_heads, d]` over keys `[kv_heads, n, d]`, and the layer's sinks -> `[kv_heads, n]`.

    reduce: how the weights `[group, queries, n]` of the queries and heads of a KV head become one, `[n]`.
    hidden: `[queries, n]`, what a query may not see.

    Cost: `queries * group * n` scores of one KV head at a time.
    """
    by_head = []
    grouped = (
        q.float().view(len(q), keys.shape[0], -1, q.shape[-1]).permute(1, 2, 0, 3)
    )  # [kv_heads, group, queries, d]
    sinks = shape.sink_logits
    by_group = [None] * len(keys) if sinks is None else sinks.view(len(keys), -1, 1)
    for own, rows, logits in zip(grouped, keys, by_group, strict=True):
        scores = own * scale @ rows.float().T  # [group, queries, n]
        scores = softcap(scores, shape.softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        by_head.append(reduce(softmax(scores, logits)))
    return torch.stack(by_head)


def stored_keys(cache: KVCache, layer: int, slot: int, length: int) -> Tensor:
    """`[kv_heads, length, head_dim]`: all keys of a sequence, wherever they lie."""
    first = cache.gpu.first(length + 1)
    memory = cache.gpu.memory[layer]
    ids, rows = cache.gpu.places(slot, torch.arange(first * cache.block, length))
    keys = memory[ids.to(memory.device), :, 0, rows.to(memory.device)]
    if first:
        keys = torch.cat([cache.read(layer, slot, range(first))[0], keys])
    return keys.transpose(0, 1)
