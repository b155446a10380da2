"""`merge_output`: the one output of a layer, of the results of all its executors."""

import torch
from torch import Tensor

from coattn.kernels.sink_logits import sink_states
from coattn.state import AttnState, Split, merge


def merge_output(states: list[AttnState | Split], like: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Disjoint parts of the attention of q `like` `[tokens, q_heads, d]` -> the output, in its dtype and place.

    sink_logits: of the layer (`LayerShape`), which no part has counted yet.
    """
    if like.device.type == "cuda" and len(states) <= 3:
        from coattn.kernels.triton.merge import merge as kernel

        pieces = [s if isinstance(s, Split) else Split(s.out, s.lse) for s in states]  # a state is one piece
        if len(pieces) < 3 or pieces[1].out.shape[1] == 1:
            return kernel(pieces, like.dtype, like.device, sink_logits)
    parts = [s.merged() if isinstance(s, Split) else s for s in states]
    return merge(*parts, *sink_states(parts[0].out, sink_logits)).out[:, 0].to(like.dtype)


def with_sinks(state: AttnState, dtype: torch.dtype, logits: Tensor | None) -> AttnState:
    """States of many queries, as for `merge_rows`, together with the layer's sinks `[q_heads]`, where it has any."""
    return state if logits is None else merge_rows([state, *sink_states(state.out, logits)], dtype)


def merge_states(states: list[AttnState | Split]) -> AttnState:
    """The same as a state, where somebody wants the log-sum-exp."""
    parts = [s for s in states if isinstance(s, AttnState)]
    if len(states) == len(parts) > 1 and parts[0].out.device.type == "cuda" and parts[0].out.shape[0] == 1:
        whole = merge_rows([AttnState(s.out[0], s.lse[0]) for s in parts], torch.float32)
        return AttnState(whole.out[None], whole.lse[None])
    return merge(*(s.merged() if isinstance(s, Split) else s for s in states))


def merge_rows(states: list[AttnState], dtype: torch.dtype, into: tuple[Tensor, Tensor] | None = None) -> AttnState:
    """States of many queries, out `[t, q_heads, d]` in any dtype and strides, lse `[t, q_heads]` -> theirs together.

    dtype: of the output. into: where output and lse are written, if they have a place already. On a GPU one pass.
    """
    if states[0].out.device.type == "cuda":
        from coattn.kernels.triton.merge_rows import merge_rows as kernel

        return kernel(states, dtype, into)
    whole = merge(*states)
    if into is None:
        return AttnState(whole.out.to(dtype), whole.lse)
    into[0].copy_(whole.out)
    into[1].copy_(whole.lse)
    return AttnState(*into)
