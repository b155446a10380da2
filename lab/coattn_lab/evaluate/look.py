"""Full attention with an onlooker: every decode step's queries, keys and weights are shown to it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from coattn.kernels.softcap import softcap
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Phase, Step


class Look(Protocol):
    """Somebody who is shown a layer of a decode step."""

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        """q `[seqs, q_heads, d]`, keys `[seqs, n, kv_heads, d]`, weights `[seqs, q_heads, n]` float32."""


class Shown(Probe):
    """Shows the decode steps of sequences of equal length. Costs a second copy of the keys."""

    def __init__(self, looks: list[Look]) -> None:
        self.looks = looks
        self.step: Step | None = None

    def open(self, runtime: Runtime) -> None:
        self.layers, self.seqs = runtime.layers, runtime.seqs
        self._keys: list[list[Tensor]] = [[] for _ in runtime.layers]

    def begin(self, step: Step) -> None:
        self.step = step

    def decoding(self) -> bool:
        """Whether the running step is a decode step."""
        return self.step is not None and self.step.phase is Phase.DECODE

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        keys = self._keep(step, layer, k)
        if step.phase is Phase.DECODE:
            weights = attention_weights(q, keys, scale, self.layers[layer])
            for look in self.looks:
                look.see(layer, q, keys, weights)

    def _keep(self, step: Step, layer: int, k: Tensor) -> Tensor:
        """Adds packed k `[tokens, kv_heads, d]`; returns all keys of the step's sequences, `[seqs, n, kv_heads, d]`."""
        new, n, first = k.reshape(step.seqs, -1, *k.shape[1:]), step.lengths[0], step.slots[0]
        if not self._keys[layer]:
            self._keys[layer].append(new.new_empty(self.seqs, 2 * n, *new.shape[2:]))
        room = self._keys[layer][0]
        if room.shape[1] < n:
            self._keys[layer][0] = room = torch.cat([room, torch.empty_like(room)], 1)
        own = room[first : first + step.seqs, :n]
        own[:, n - new.shape[1] :] = new
        return own


def group(x: Tensor, kv_heads: int) -> Tensor:
    """`[seqs, q_heads, n]` -> `[seqs, kv_heads, group, n]`."""
    return x.reshape(len(x), kv_heads, -1, x.shape[-1])


def attention_weights(q: Tensor, keys: Tensor, scale: float, layer: LayerShape) -> Tensor:
    """q `[seqs, q_heads, d]` of the newest token over keys `[seqs, n, kv_heads, d]` -> `[seqs, q_heads, n]` float32."""
    grouped = group(q.float(), keys.shape[2]) * scale
    scores = torch.einsum("shgd,snhd->shgn", grouped, keys.float()).flatten(1, 2)
    scores = softcap(scores, layer.softcap)
    if layer.sliding_window is not None:
        scores[..., : max(0, keys.shape[1] - layer.sliding_window)] = -torch.inf
    return scores.softmax(-1)
