"""`delta_rule`: one token of every sequence through a gated delta rule, between the products around it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coattn.kernels.operation import Operation


class DeltaWeights(NamedTuple):
    """What a layer has besides its products."""

    conv: Tensor
    """`[channels, taps]`, channels: keys' heads of the queries and of the keys, then the values' heads."""
    conv_bias: Tensor | None
    decay: Tensor
    """`[v_heads]`, the logarithm of how fast a state is forgotten."""
    shift: Tensor
    """`[v_heads]`, added to what a token says about it."""
    norm: Tensor
    """`[v_size]`, of the output of each head."""
    eps: float


NORM_EPS = 1e-6
"""Of the lengths of queries and keys."""


@Operation
def delta_rule(x: Tensor, own: DeltaWeights, conv: Tensor, state: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """x `[seqs, channels + v_heads * v_size + 2 * v_heads]`: what goes into the convolution, gates of the output, how
    much each head writes and how fast it forgets -> `[seqs, v_heads * v_size]`.

    conv `[rows, channels, taps]`, state `[rows, v_heads, k_size, v_size]` in float32: rows `read [seqs]` of both are
    the sequences' states, rows `write` become the new ones.
    """
    seqs, (_, v_heads, k_size, v_size) = len(x), state.shape
    channels, dtype = len(own.conv), x.dtype
    k_heads = (channels - v_heads * v_size) // (2 * k_size)
    new, gate, beta, speed = torch.split(x, [channels, v_heads * v_size, v_heads, v_heads], -1)
    window = torch.cat([conv[read.long(), :, 1:], new[..., None].to(conv.dtype)], -1)
    conv[write.long()] = window
    summed = functional.conv1d(window, own.conv[:, None], own.conv_bias, groups=channels)[..., 0]
    heads = functional.silu(summed).to(dtype).float()
    q, k, v = torch.split(heads, [k_heads * k_size, k_heads * k_size, v_heads * v_size], -1)
    q, k = (y.view(seqs, k_heads, k_size).repeat_interleave(v_heads // k_heads, 1) for y in (q, k))
    q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + NORM_EPS) for y in (q, k))
    kept = torch.exp(-own.decay.float().exp() * functional.softplus(speed.float() + own.shift.float()))
    old = state[read.long()] * kept[..., None, None]
    missing = v.view(seqs, v_heads, v_size) - (old * k[..., None]).sum(-2)
    old = old + k[..., None] * (missing * beta.sigmoid().float()[..., None])[..., None, :]
    state[write.long()] = old
    out = (old * (q / k_size**0.5)[..., None]).sum(-2).to(dtype).float()
    out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + own.eps)
    out = (own.norm * out.to(dtype)).float() * functional.silu(gate.view(seqs, v_heads, v_size).float())
    made: Tensor = out.to(dtype).flatten(1)
    return made
