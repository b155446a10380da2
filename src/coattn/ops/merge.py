"""`merge_output`: the one result of all places of a layer."""

from __future__ import annotations

from torch import Tensor

from coattn.state import AttnState, Split, merge


def merge_output(states: list[AttnState | Split], like: Tensor) -> Tensor:
    """Disjoint parts of the attention of q `like` `[tokens, q_heads, d]` -> the output, in its dtype and place."""
    if like.device.type == "cuda" and len(states) <= 3:
        from coattn.ops.triton.merge import merge as kernel

        pieces = [s if isinstance(s, Split) else Split.of(s) for s in states]
        if len(pieces) < 3 or pieces[1].out.shape[1] == 1:
            return kernel(pieces, like.dtype, like.device)
    whole = merge(*(s.merged() if isinstance(s, Split) else s for s in states))
    return whole.out[:, 0].to(like.dtype)


def merge_states(states: list[AttnState | Split]) -> AttnState:
    """The same as a state, where somebody wants the log-sum-exp."""
    return merge(*(s.merged() if isinstance(s, Split) else s for s in states))
