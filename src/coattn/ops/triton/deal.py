"""`deal` on a GPU: one program a KV head of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coattn.ops.attend_scored import Chosen

SIZE = 128


@triton.jit
def _deal(
    ids_ptr, later_ptr, found_ptr, tokens_ptr, stay_ptr, index_ptr, count_ptr,
    kv_heads, n, splits, most, most_later, look, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    own = row * kv_heads + head
    each = tl.cdiv(tl.cdiv(tl.load(tokens_ptr + row), look), splits) * look
    quota = tl.cdiv(tl.load(stay_ptr), splits)
    x = tl.arange(0, SIZE)
    taken = 0
    for split in range(splits):
        piece = own * splits + split
        found = tl.load(found_ptr + piece * 3)
        later = tl.load(found_ptr + piece * 3 + 1)
        more = tl.minimum(tl.maximum(found - quota, 0), most - taken)
        room = tl.minimum(more, most_later - later)
        first = own * n + split * each + found - more
        for start in range(0, more, SIZE):
            here = start + x < more
            token = tl.load(ids_ptr + first + start + x, mask=here, other=0)
            tl.store(index_ptr + own * most + taken + start + x, token, mask=here)
            tl.store(later_ptr + piece * most_later + later + start + x, token, mask=start + x < room)
        tl.store(found_ptr + piece * 3, found - more)
        tl.store(found_ptr + piece * 3 + 1, later + room)
        taken += more
    tl.store(count_ptr + own, taken)


def deal(chosen: Chosen, stay: Tensor, index: Tensor, count: Tensor) -> None:
    """See `ops/deal.py`."""
    rows, kv_heads, splits, _ = chosen.count.shape
    _deal[(rows, kv_heads)](
        chosen.ids, chosen.later, chosen.count, chosen.tokens, stay, index, count, kv_heads, chosen.ids.shape[-1],
        splits, index.shape[-1], chosen.later.shape[-1], chosen.look, SIZE=SIZE, num_warps=1,
    )  # fmt: skip
