"""`merge_rows`: states of many queries, wherever they lie, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coattn.kernels.upload import upload
from coattn.state import AttnState

COUNTS = (2, 4, 8)
"""Numbers of states that there are programs for: one for every number would be compiled in the middle of a prompt."""
MOST = COUNTS[-1]
"""States of one pass; of more, the result of the first ones is one of the next pass."""
HEADS = 4


@triton.jit
def _lse(lse_ptr, token, head, there, lse_token, lse_head):
    return tl.load(lse_ptr + token * lse_token + head * lse_head, mask=there, other=float("-inf"))


@triton.jit
def _out(out_ptr, token, head, d, there, out_token, out_head, D: tl.constexpr):
    at = out_ptr + token * out_token + head[:, None] * out_head + d[None, :]
    return tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _merge_rows(
    out_0, out_1, out_2, out_3, out_4, out_5, out_6, out_7, lse_0, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7,
    result_ptr, total_ptr, strides_ptr, count, heads, result_token, total_token,
    COUNT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """The first `count` of COUNT states. strides: of each, of its output and its lse, how far the next token and the
    next head are."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D_PAD)
    outs = (out_0, out_1, out_2, out_3, out_4, out_5, out_6, out_7)
    lses = (lse_0, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    for i in tl.static_range(COUNT):
        s = strides_ptr + 4 * i
        there = head < tl.where(count > i, heads, 0)
        top = tl.maximum(top, _lse(lses[i], token, head, there, tl.load(s + 2), tl.load(s + 3)))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D_PAD], tl.float32)
    for i in tl.static_range(COUNT):
        s = strides_ptr + 4 * i
        there = head < tl.where(count > i, heads, 0)
        weight = tl.exp(_lse(lses[i], token, head, there, tl.load(s + 2), tl.load(s + 3)) - shift)
        total += weight
        out = _out(outs[i], token, head, d, there, tl.load(s), tl.load(s + 1), D)
        acc += tl.where((weight > 0)[:, None], weight[:, None] * out, 0.0)
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    at = result_ptr + token * result_token + head[:, None] * D + d[None, :]
    tl.store(at, acc.to(result_ptr.dtype.element_ty), mask=(head < heads)[:, None] & (d < D)[None, :])
    lse = tl.where(some, shift + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(total_ptr + token * total_token + head, lse, mask=head < heads)


def merge_rows(states: list[AttnState], dtype: torch.dtype, into: tuple[Tensor, Tensor] | None = None) -> AttnState:
    """See `coattn.kernels.merge.merge_rows`; `into` has heads side by side."""
    while len(states) > MOST:
        states = [merge_rows(states[:MOST], torch.float32), *states[MOST:]]
    like = states[0].out
    tokens, heads, d = like.shape
    if into is None:
        out = torch.empty(like.shape, dtype=dtype, device=like.device)
        into = out, torch.empty(like.shape[:2], dtype=torch.float32, device=like.device)
    full = states + [states[0]] * (MOST - len(states))
    count = next(each for each in COUNTS if each >= len(states))
    rows = [[*each.out.stride()[:2], *each.lse.stride()] for each in full[:count]]
    strides = _strides(tuple(map(tuple, rows)), like.device)
    _merge_rows[(tokens, triton.cdiv(heads, HEADS))](
        *(each.out for each in full), *(each.lse for each in full),
        into[0], into[1], strides, len(states), heads, into[0].stride(0), into[1].stride(0),
        COUNT=count, HEADS=HEADS, D=d, D_PAD=triton.next_power_of_2(d), num_warps=2,
    )  # fmt: skip
    return AttnState(*into)


_made: dict[tuple[tuple[tuple[int, ...], ...], torch.device], Tensor] = {}


def _strides(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The same few lists come back in every layer: kept, so that nothing is copied to the GPU between two layers."""
    if len(_made) > 256:
        _made.clear()
    key = rows, device
    if key not in _made:
        _made[key] = upload(torch.tensor(rows, dtype=torch.int64), device)
    return _made[key]
