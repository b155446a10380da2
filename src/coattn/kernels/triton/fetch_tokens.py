"""`fetch_tokens`: rows out of mapped host memory, a few of one KV head a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
"""Of a program: their loads are on their way together."""


@triton.jit
def _fetch_tokens(
    to_ptr, host_ptr, table_ptr, count_ptr, heads, k, to_token, to_head, to_side, host_token, host_head, host_side,
    TOKENS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    list_id = tl.program_id(1)
    seq, head = (list_id // heads).to(tl.int64), (list_id % heads).to(tl.int64)
    i, d = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, D_PAD)
    wanted = i < tl.load(count_ptr + list_id)
    source = tl.load(table_ptr + list_id.to(tl.int64) * k + i, mask=wanted, other=0).to(tl.int64)
    inside = wanted[:, None] & (d < D)[None, :]
    away = host_ptr + (source * host_token + head * host_head)[:, None] + d[None, :]
    home = to_ptr + ((seq * k + i) * to_token + head * to_head)[:, None] + d[None, :]
    for side in tl.static_range(2):
        tl.store(home + side * to_side, tl.load(away + side * host_side, mask=inside), mask=inside)


def fetch_tokens(to: Tensor, host: Tensor, table: Tensor, count: Tensor) -> None:
    """See the reference; `host` may lie in mapped host memory. The list stays on the GPU: nothing waits for it."""
    seqs, heads, k = table.shape
    d = to.shape[-1]
    _fetch_tokens[(triton.cdiv(k, TOKENS), seqs * heads)](
        to, host, table.contiguous(), count.contiguous(), heads, k, *to.stride()[:3], *host.stride()[:3],
        TOKENS=TOKENS, D=d, D_PAD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
