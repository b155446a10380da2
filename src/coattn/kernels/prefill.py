"""`prefill`: dense causal attention over tokens that are all in hand."""

import torch
from torch import Tensor

from coattn.kernels.merge import merge_rows, with_sinks
from coattn.kernels.prompt import Mask, attend_prompt
from coattn.kernels.rotate import rotate
from coattn.state import AttnState
from coattn.types import LayerShape


def prefill(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> Tensor:
    """q `[t, q_heads, d]`, k, v `[t, kv_heads, d]` of one sequence -> `[t, q_heads, d]`. No log-sum-exp is needed."""
    mask = Mask(True, layer.sliding_window, 0, layer.softcap)
    return with_sinks(attend_prompt(q, k, v, scale, mask), q.dtype, layer.sink_logits).out.to(q.dtype)


def extend(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> AttnState:
    """The same with the log-sum-exp and without sinks, for tokens whose history is attended elsewhere; no window."""
    return attend_prompt(q, k, v, scale, Mask(True, softcap=layer.softcap))


def follow(q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor, scale: float, layer: LayerShape) -> AttnState:
    """Tokens q `[t, q_heads, d]`, k, v `[t, kv_heads, d]` after a history old_k, old_v `[n, kv_heads, d]`; like q.

    Sinks are not counted, nor in `look_back`.
    """
    own = extend(q, k, v, scale, layer)
    history = attend_prompt(q, old_k, old_v, scale, Mask(False, softcap=layer.softcap))
    return merge_rows([own, history], q.dtype)


def look_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    layer: LayerShape,
    window: int | None,
    sinks: int,
    position: int | None = None,
) -> AttnState:
    """q are the last of the tokens of k, v `[n, kv_heads, d]`, and look back `window` tokens and to the first ones.

    position: of the first of q in the text, where positions count inside a cache of `sinks + window` tokens: then a
    query sees the first ones nearer, by as many tokens as lie between them and its window.
    """
    rope, mask = layer.rope, Mask(True, window, sinks, layer.softcap)
    old = len(k) - len(q)
    gone: list[int] = []
    if position is not None and window is not None:
        gone = [position + i - min(old + i, sinks + window - 1) for i in range(len(q))]
    if rope is None or not any(gone):
        return attend_prompt(q, k, v, scale, mask)
    whole = gone.count(0)  # these see all there is, at its position in the text
    turn = torch.tensor(gone[whole:], device=q.device)
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float64, device=q.device)
    near = attend_prompt(q[whole:], k[sinks:], v[sinks:], scale, Mask(True, window, 0, layer.softcap))
    turned = rotate(q[whole:], -turn[:, None], frequencies, rope.interleaved)
    first = attend_prompt(turned, k[:sinks], v[:sinks], scale, Mask(False, softcap=layer.softcap))
    state = merge_rows([near, first], torch.float32)
    if not whole:
        return state
    own = attend_prompt(q[:whole], k[: old + whole], v[: old + whole], scale, mask)
    return AttnState(torch.cat([own.out, state.out]), torch.cat([own.lse, state.lse]))
