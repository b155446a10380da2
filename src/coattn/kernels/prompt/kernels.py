"""The kernels that give a log-sum-exp: PyTorch's over cuDNN and flash attention, and our own.

Each takes q `[t, q_heads, d]`, k, v `[n, kv_heads, d]`, any strides but the last, and repeats no keys or values for the
query heads of a group. Each has its own layouts; what leaves here has out `[t, q_heads, d]` and lse `[t, q_heads]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.kernels.prompt.mask import Mask, Shape
from coattn.kernels.prompt.reference import reference
from coattn.state import AttnState

TILES = (8192, 4096, 2048)
"""Numbers of queries that cuDNN is asked for. It compiles a program for every shape and its strides, which takes
hundreds of milliseconds, so other numbers are cut into these, and what is left over goes to another kernel."""
PIECES = (65536, 32768, 16384, *TILES)
"""Numbers of keys, likewise."""
HALVES = (torch.bfloat16, torch.float16)
ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 256
"""Head size."""
LEAST_TILE, MOST_TILE = 64, 512
"""Queries of a tile under a window: about as many as it reaches, so that half of what is computed is seen."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute it. refuses: why it cannot take a shape, or None."""

    name: str
    refuses: Callable[[Shape], str | None]
    run: Callable[[Tensor, Tensor, Tensor, float, Mask], AttnState]


def _cudnn_refuses(shape: Shape) -> str | None:
    common = _halves_on_gpu(shape)
    if common is not None:
        return common
    if not shape.mask.plain:
        return "it has no windows and no soft-capping"
    if shape.mask.causal and shape.tokens != shape.keys:
        return "its causal mask has no history"
    if shape.tokens not in TILES or shape.keys not in PIECES:
        return f"it would be compiled for {shape.tokens:,} queries over {shape.keys:,} keys"
    return None


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    # a program is compiled for every set of strides: values that lie between queries and keys are copied, so that there
    # is one set
    queries, keys, values = (x.contiguous().transpose(0, 1)[None] for x in (q, k, v))
    done = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, mask.causal, False, scale=scale
    )
    return _state(done[0][0].transpose(0, 1), done[1], len(q))


def _flash_refuses(shape: Shape) -> str | None:
    common = _halves_on_gpu(shape)
    if common is not None:
        return common
    if shape.mask.softcap is not None or shape.mask.sinks:
        return "it has no soft-capping, and no sinks beside a window"
    return None


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    back = None if mask.window is None else mask.window - 1
    done = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, mask.causal, False,
        scale=scale, window_size_left=back, window_size_right=None if back is None else 0,
    )  # fmt: skip
    return _state(done[0][0], done[1], len(q))


def _own_refuses(shape: Shape) -> str | None:
    if shape.device.type != "cuda":
        return "it runs on a GPU"
    if shape.head_dim > LARGEST:
        return f"head size {shape.head_dim} is larger than {LARGEST}"
    return None


def _own(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    from coattn.kernels.triton.attend_prompt import attend_prompt

    return attend_prompt(q, k, v, scale, mask)


def _cpu_refuses(shape: Shape) -> str | None:
    if shape.device.type != "cpu":
        return "it runs on a CPU"
    if shape.dtype not in ON_CPU:
        return f"q is {shape.dtype}"
    if shape.mask.softcap is not None:
        return "it has no soft-capping"
    if shape.mask.window is None and shape.mask.causal and shape.tokens != shape.keys:
        return "its causal mask has no history"
    return None


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    """Under a window queries in tiles, each over the keys that any of them sees, with a mask. q are the last of the
    tokens of k, v; cost: t x (window + tile) pairs instead of t x n."""
    if mask.window is None:
        return _cpu_whole(q, k, v, scale, mask.causal, None)
    t, n = len(q), len(k)
    tile = min(MOST_TILE, max(LEAST_TILE, mask.window))
    parts = []
    for start in range(0, t, tile):
        end = min(t, start + tile)
        positions = torch.arange(n - t + start, n - t + end)
        first, last = max(0, n - t + start - mask.window + 1), n - t + end
        kept = torch.arange(first, last)
        keys, values = k[first:last], v[first:last]
        sinks = min(mask.sinks, first)
        if sinks:
            kept = torch.cat([torch.arange(sinks), kept])
            keys, values = (torch.cat([x[:sinks], part]) for x, part in ((k, keys), (v, values)))
        behind = positions[:, None] - kept[None]
        seen = (behind >= 0) & ((behind < mask.window) | (kept < mask.sinks)[None])
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        parts.append(_cpu_whole(q[start:end], keys, values, scale, False, bias))
    return AttnState(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _cpu_whole(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None) -> AttnState:
    """bias `[t, n]`, of q's dtype, is added to the scores. Rows of a head side by side: the kernel's products run over
    them. A group shares its head by a stride of zero."""
    (t, q_heads, d), kv_heads = q.shape, k.shape[1]
    group = q_heads // kv_heads
    queries = q.view(t, kv_heads, group, d).permute(1, 2, 0, 3).contiguous()
    keys, values = (x.transpose(0, 1).contiguous()[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=bias, scale=scale
    )
    return AttnState(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1))


KERNELS = (
    Kernel("cudnn", _cudnn_refuses, _cudnn),
    Kernel("flash", _flash_refuses, _flash),
    Kernel("own", _own_refuses, _own),
    Kernel("cpu", _cpu_refuses, _cpu),
    Kernel("reference", lambda _: None, reference),
)
"""Fastest first, where nothing was measured."""


def _halves_on_gpu(shape: Shape) -> str | None:
    if shape.device.type != "cuda":
        return "it runs on a GPU"
    if shape.dtype not in HALVES or shape.head_dim % 8 or shape.head_dim > LARGEST:
        return f"q is {shape.dtype}, or head size {shape.head_dim} does not fit"
    return None


def _state(out: Tensor, lse: Tensor, tokens: int) -> AttnState:
    """lse as kernels give it: `[1, heads, t]`, with a last axis of one (cuDNN), or longer than t (padded rows)."""
    rows: Any = lse.squeeze(-1) if lse.dim() == 4 else lse
    return AttnState(out, rows[0, :, :tokens].transpose(0, 1))
