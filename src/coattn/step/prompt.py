"""Several new tokens a sequence, a prompt's or a turn's: dense among themselves, the method's way over the history."""

import torch
from torch import Tensor

from coattn.kernels.merge import merge_rows, merge_states, with_sinks
from coattn.kernels.prefill import extend, follow, look_back, prefill
from coattn.parts.call import AttentionCall
from coattn.parts.schedule.base import executor_of, nothing
from coattn.state import AttnState
from coattn.step.layer_group import LayerGroup
from coattn.types import Step


def read_new(group: LayerGroup, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention output like q `[tokens, q_heads, d]`, packed; k and v `[tokens, kv_heads, d]` are stored."""
    parts = [
        _read(group, step, i, layer, q[start:end], k[start:end], v[start:end], scale)
        for i, (start, end) in enumerate(step.spans)
        if start < end
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)
    group.maintenance.observe_queries(layer, q, step, scale)
    group.store(layer, k, v, step)
    return out


def _read(group: LayerGroup, step: Step, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The step's tokens of its i-th sequence."""
    shape = group.cache.spec.layers[layer]
    if not step.history[i]:
        return prefill(q, k, v, scale, shape)
    history = group.cache.gpu.history(layer, step.slots[i], step.history[i])
    if history is not None and history.window is None:
        state = follow(q, k, v, history.k, history.v, scale, shape)
    elif history is not None:
        keys, values = torch.cat([history.k, k]), torch.cat([history.v, v])
        state = look_back(q, keys, values, scale, shape, history.window, history.sinks, history.position)
    else:
        call = AttentionCall(layer, shape, q[None], scale, step.alone(i), group.cache, group.index)
        seen = _attend_history(group, call, last=step.seqs > 1)
        own = extend(q, k, v, scale, shape)
        state = merge_rows([own, AttnState(seen.out[0], seen.lse[0])], q.dtype)
    return with_sinks(state, q.dtype, shape.sink_logits).out.to(q.dtype)


def _attend_history(group: LayerGroup, call: AttentionCall, last: bool) -> AttnState:
    """Many queries over what a sequence has stored. last: the next layer is not what comes next."""
    layers = list(group.cache.spec.layers)
    following = layers.index(call.layer) + 1
    upcoming = None if last or following == len(layers) else layers[following]
    works = group.select.pick(call).works
    states = [executor_of(group.executors, work).read(call, work, upcoming) for work in works]
    return merge_states(states or nothing(call))
