"""What a runtime shows of its steps to measurements."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.layer_group import LayerGroup
from coattn.types import Selection, Step


class Probe:
    """Sees a runtime's steps, and changes nothing. Override what is of interest.

    A captured step shows what it does once, when it is captured: probes are for steps that are not.
    """

    def open(self, runtime: Any) -> None:
        """A `Runtime` has been opened whose steps it will see. Untyped here, since runtimes know probes."""

    def begin(self, step: Step) -> None:
        """A step begins."""

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """A layer is about to attend: q `[tokens, q_heads, d]`, k, v `[tokens, kv_heads, d]`, packed."""

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        """What a layer of a decode step attends to, and the results before they are merged."""

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        """What the layer's attention gives, like q."""

    def commit(self, step: Step) -> None:
        """The step is over."""

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """A sequence has only its first `keep` tokens from now on."""


class Sampled(NamedTuple):
    """What a layer saw of a text: keys `[tokens, kv_heads, d]` after RoPE, in host memory, and the mean of `q q^T` over
    the queries of each KV head, `[kv_heads, d, d]`."""

    keys: Tensor
    moment: Tensor


class Collected(Probe):
    """Keeps every key, and sums up what queries are like."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.moments = [torch.zeros(())] * layers
        self.queries = [0] * layers

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.keys[layer].append(k.cpu())
        grouped = q.double().view(len(q), k.shape[1], -1, k.shape[2])
        self.moments[layer] = self.moments[layer] + torch.einsum("thxd,thxe->hde", grouped, grouped).cpu()
        self.queries[layer] += len(q) * grouped.shape[2]

    def layers(self, skipped: int = 0) -> list[Sampled]:
        """What each layer saw, without the first keys of each prompt."""
        means = (moment / count for moment, count in zip(self.moments, self.queries, strict=True))
        return [Sampled(torch.cat([k[skipped:] for k in x]), mean) for x, mean in zip(self.keys, means, strict=True)]
