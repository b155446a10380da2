"""`attend_prompt`: the fastest kernel that fits, and in pieces where it takes the call only in pieces."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coattn.kernels.merge import merge_rows
from coattn.kernels.prompt.choice import best, tile_kernel
from coattn.kernels.prompt.kernels import PIECES, TILES, Kernel
from coattn.kernels.prompt.mask import Mask, Shape
from coattn.state import AttnState

CAUSAL, ALL = Mask(True), Mask(False)


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask = CAUSAL) -> AttnState:
    """q `[t, q_heads, d]` over k, v `[n, kv_heads, d]` of one sequence; causal: the queries are the last t of n tokens.

    -> out `[t, q_heads, d]`, in q's dtype or float32, and lse.
    """
    if not len(q) or not len(k):
        return AttnState.empty(q)
    shape = Shape.of(q, k, mask)
    tiles = tile_kernel(shape)
    if tiles is not None:
        return in_tiles(q, k, v, scale, shape, tiles)
    before = shape.keys - shape.tokens
    if before and shape.mask == CAUSAL and q.device.type == "cpu":
        own = attend_prompt(q, k[before:], v[before:], scale)
        return merge_rows([own, attend_prompt(q, k[:before], v[:before], scale, ALL)], torch.float32)
    return best(shape).run(q, k, v, scale, shape.mask)


def in_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, shape: Shape, kernel: Kernel) -> AttnState:
    """Queries and keys in pieces of the sizes that the kernel is compiled for; what is left over by another one."""
    causal, before = shape.mask.causal, shape.keys - shape.tokens
    whole = len(q) in TILES and (not before if causal else len(k) in PIECES)
    if whole:  # nothing to merge
        return kernel.run(q, k, v, scale, shape.mask)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for start, size in cut(len(q), TILES):
        end = start + size
        own, seen = q[start:end], before + end if causal else len(k)
        if size not in TILES:
            rest = Shape.of(own, k[:seen], shape.mask)
            state = best(rest).run(own, k[:seen], v[:seen], scale, shape.mask)
            out[start:end], lse[start:end] = state.out, state.lse
            continue
        states = []
        if causal:
            seen -= size
            states.append(kernel.run(own, k[seen : seen + size], v[seen : seen + size], scale, CAUSAL))
        for first, count in cut(seen, PIECES):
            keys, values = k[first : first + count], v[first : first + count]
            each = kernel if count in PIECES else best(Shape.of(own, keys, ALL))
            states.append(each.run(own, keys, values, scale, ALL))
        merge_rows(states, q.dtype, (out[start:end], lse[start:end]))
    return AttnState(out, lse)


def cut(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(start, size)`: as much as the largest size takes, then the next; what is left over is the last."""
    start = 0
    for size in sizes:
        while total - start >= size:
            yield start, size
            start += size
    if start < total:
        yield start, total - start
