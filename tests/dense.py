"""The oracle: attention as the textbook writes it, in float64, one sequence at a time."""

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: int = 0,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """q `[t, q_heads, d]` are the last tokens of k, v `[n, kv_heads, d]`; it sees the last `window` and `sinks`.

    sink_logits: see `LayerShape`.
    """
    t, n, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(n - t, n)[:, None], torch.arange(n)[None]
    seen = key <= position
    if window is not None:
        seen &= (key > position - window) | (key < sinks)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if sink_logits is None:
        return torch.einsum("htn,nhd->thd", scores.softmax(-1), v)
    beside = sink_logits.to(dtype)[:, None, None].expand(-1, t, 1)
    return torch.einsum("htn,nhd->thd", torch.cat([scores, beside], -1).softmax(-1)[..., :-1], v)


def assert_as_exact(out: Tensor, reference: Tensor, same_precision: Tensor) -> None:
    """The error is at most twice that of the plain computation in the same precision (and a rounding of the output)."""
    error = (out.double() - reference).abs().max().item()
    allowed = 2 * (same_precision.double() - reference).abs().max().item()
    floor = torch.finfo(out.dtype).eps * max(1.0, reference.abs().max().item())
    assert error <= allowed + floor, f"error {error:.3g}, allowed {allowed:.3g} + {floor:.3g}"
