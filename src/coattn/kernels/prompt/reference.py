"""The plain meaning of `attend_prompt`."""

import torch
from torch import Tensor

from coattn.kernels.prompt.mask import Mask
from coattn.kernels.softcap import softcap as capped
from coattn.state import AttnState

CHUNK = 256
"""Queries per chunk: bounds the score matrix to `q_heads x CHUNK x keys` floats."""


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> AttnState:
    """q `[t, q_heads, d]`, k, v `[n, kv_heads, d]` -> out like q, lse `[t, q_heads]`; see `Mask`.

    Under a window a query at position p sees keys at `max(0, p - window + 1) .. p`, and the first `sinks` keys up to p.
    """
    window, sinks = mask.window, mask.sinks
    t, q_heads, d = q.shape
    n, kv_heads, _ = k.shape
    keys, values = (x.to(torch.float32).transpose(0, 1) for x in (k, v))
    outs, lses = [], []
    for start in range(0, t, CHUNK):
        part = q[start : start + CHUNK].to(torch.float32) * scale
        position = torch.arange(start, start + len(part), device=q.device)[:, None] + (n - t)
        first = 0 if window is None or sinks else max(0, n - t + start - window + 1)
        end = n - t + start + len(part) if mask.causal else n
        key_position = torch.arange(first, end, device=q.device)[None, :]
        seen = (key_position <= position) | (not mask.causal)
        if window is not None:
            seen &= (key_position > position - window) | (key_position < sinks)
        grouped = part.view(len(part), kv_heads, q_heads // kv_heads, d)
        scores = torch.einsum("thgd,hnd->htgn", grouped, keys[:, first:end])
        scores = capped(scores, mask.softcap).masked_fill(~seen[None, :, None, :], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        outs.append(torch.einsum("htgn,hnd->thgd", weights, values[:, first:end]).reshape(part.shape))
        lses.append(lse.permute(1, 0, 2).reshape(len(part), q_heads))
    if not outs:
        return AttnState.empty(q)
    return AttnState(torch.cat(outs), torch.cat(lses))
