"""Several new tokens a sequence, a prompt's or a turn's: dense among themselves, the method's way over the history."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.kernels.blockwise import Blockwise, Prompt
from coattn.kernels.merge import merge_rows, merge_states, with_sinks
from coattn.kernels.prefill import extend, follow, look_back, prefill
from coattn.parts.call import AttentionCall
from coattn.parts.schedule.base import executor_of, nothing
from coattn.state import AttnState
from coattn.step.layer_group import LayerGroup
from coattn.types import LayerShape, Step


class PromptReader:
    """How the layers of a model read. Remembers prompts that are read block by block until they end."""

    def __init__(self, layers: Sequence[LayerShape], blockwise: Blockwise | None) -> None:
        self.layers, self.blockwise = layers, blockwise
        self.blockwise_prompts: dict[tuple[int, int], Prompt] = {}
        """By sequence and layer: a prompt that is being read block by block."""

    def extend(
        self, group: LayerGroup, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Attention output like q `[tokens, q_heads, d]`, packed; k and v `[tokens, kv_heads, d]` are stored."""
        parts = [
            self._read(group, step, i, layer, q[start:end], k[start:end], v[start:end], scale)
            for i, (start, end) in enumerate(step.spans)
            if start < end
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)
        group.maintenance.observe_queries(layer, q, step, scale)
        group.store(layer, k, v, step)
        return out

    def end(self, slots: Sequence[int]) -> None:
        """Their prompts are over."""
        for key in [key for key in self.blockwise_prompts if key[0] in slots]:
            del self.blockwise_prompts[key]

    def _read(
        self, group: LayerGroup, step: Step, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """The step's tokens of its i-th sequence."""
        prompt = self._prompt(step.slots[i], layer, step.history[i])
        if prompt is None:
            return self._read_exactly(group, step, i, layer, q, k, v, scale)
        cut = len(q) if step.slots[i] in step.more else max(0, len(q) - prompt.sizes.question)
        parts = [prompt.attend(q[:cut], k[:cut], v[:cut], scale, self.layers[layer])] if cut else []
        if cut < len(q):
            parts.append(self._read_exactly(group, step, i, layer, q[cut:], k, v, scale))
            prompt.length += len(q) - cut
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_exactly(
        self, group: LayerGroup, step: Step, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """q: of all, or of the last of the sequence's new tokens."""
        shape, alone = self.layers[layer], step.alone(i)
        if not step.history[i]:
            return prefill(q, k, v, scale, shape)
        history = group.cache.gpu.history(layer, step.slots[i], step.history[i])
        if history is not None and history.window is None:
            state = follow(q, k, v, history.k, history.v, scale, shape)
        elif history is not None:
            keys, values = torch.cat([history.k, k]), torch.cat([history.v, v])
            state = look_back(q, keys, values, scale, shape, history.window, history.sinks, history.position)
        else:
            call = AttentionCall(layer, shape, q[None], scale, alone, group.cache, group.index)
            seen = _attend_history(group, call, last=step.seqs > 1)
            own = extend(q, k, v, scale, shape)
            state = merge_rows([own, AttnState(seen.out[0], seen.lse[0])], q.dtype)
        return with_sinks(state, q.dtype, shape.sink_logits).out.to(q.dtype)

    def _prompt(self, slot: int, layer: int, history: int) -> Prompt | None:
        """The prompt whose next tokens these are, where prompts are read block by block; not those of a later turn."""
        if self.blockwise is None or self.layers[layer].sliding_window is not None:
            return None
        if history == 0:
            self.blockwise_prompts[slot, layer] = Prompt(self.blockwise)
        prompt = self.blockwise_prompts.get((slot, layer))
        return prompt if prompt is not None and prompt.length == history else None


def _attend_history(group: LayerGroup, call: AttentionCall, last: bool) -> AttnState:
    """Many queries over what a sequence has stored. last: the next layer is not what comes next."""
    layers = list(group.cache.spec.layers)
    following = layers.index(call.layer) + 1
    upcoming = None if last or following == len(layers) else layers[following]
    works = group.select.pick(call).works
    states = [executor_of(group.executors, work).read(call, work, upcoming) for work in works]
    return merge_states(states or nothing(call))
