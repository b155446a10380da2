"""`fetch_tokens`: single tokens of each KV head from DRAM into GPU memory, side by side."""

import torch
from torch import Tensor

from coattn.kernels.operation import Operation


@Operation
def fetch_tokens(to: Tensor, host: Tensor, table: Tensor, count: Tensor) -> None:
    """Token `table[s, h, i]` of `host`, KV head h, becomes token `s * k + i` of `to`, for every i below `count[s, h]`.

    to: `[n, kv_heads, 2, 1, d]` on the device; host: `[places, kv_heads, 2, 1, d]` of any strides but the last;
    table: `[seqs, kv_heads, k]` int32; count: `[seqs, kv_heads]` int32, both on the device of `to`.
    """
    k = table.shape[-1]
    wanted = torch.arange(k, device=table.device) < count[..., None]
    seq, head, i = wanted.nonzero().unbind(1)
    source = table[wanted].long().to(host.device)
    to[seq * k + i, head] = host[source, head.to(host.device)].to(to.device)
