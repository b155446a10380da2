"""What the pool of a sequence holds when its prompt ends."""

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.pool_memory import PoolTensors

LEARNT_TOKENS = 4096
"""Keys that say in which terms rows in 8 bits are, evenly spaced."""


@Operation
def fill_pool(pool: PoolTensors, slot: int, tokens: Tensor, k: Tensor, v: Tensor) -> None:
    """All that the pool of a slot holds from now on.

    tokens: `[kv_heads, n]` int64 positions, those that are pinned first and then those wanted most, n a multiple of
    the block; k, v: `[kv_heads, all, d]`, of all positions, of any strides but the last.
    """
    at = tokens[..., None].expand(-1, -1, k.shape[-1])
    learn = k[:, :: max(1, k.shape[1] // LEARNT_TOKENS)]
    pool.fill(slot, tokens, k.gather(1, at), v.gather(1, at), learn)


@Operation
def weights(q: Tensor, k: Tensor) -> Tensor:
    """The highest weight of each key with any of some queries, `[kv_heads, n]` float32.

    q `[rows, q_heads, d]`, k `[kv_heads, n, d]`, of any strides but the last.
    """
    rows = q.view(len(q), len(k), -1, q.shape[-1]).transpose(0, 1).flatten(1, 2).to(k.dtype) * q.shape[-1] ** -0.5
    # the scale of scores does not change which weigh most, nearly
    return torch.stack([(own @ keys.T).float().softmax(-1).amax(0) for own, keys in zip(rows, k, strict=True)])
