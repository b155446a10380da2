"""`rotate`: keys or queries moved to other positions, by the rotation that their model gives positions (RoPE)."""

import torch
from torch import Tensor


def rotate(x: Tensor, by: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """x `[..., d]` that lies at some position -> the same `by` positions later; by broadcasts to `[...]`.

    frequencies: `[pairs]` float64, the angle of each pair of channels in radians a position. The first `2 * pairs`
    channels are turned: neighbours are a pair (interleaved), or channel i and channel i + pairs. Angles are in float64:
    positions are many turns.
    """
    pairs = len(frequencies)
    angle = by[..., None].double() * frequencies
    cos, sin = angle.cos().float(), angle.sin().float()
    turned, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    one, other = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    both = (one * cos - other * sin, other * cos + one * sin)
    rotated = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)
