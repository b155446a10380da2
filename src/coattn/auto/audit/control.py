"""How much of what it lacks a step waits for, so that the error stays as small as was promised."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

AIM = 0.75
"""Of the target: what the control aims at, so that chance takes few answers past it."""
LARGEST = 32.0
"""A case counts as at most so many times what is aimed at."""
GAIN = 1 / 32
"""What a case changes in every layer."""
LAYER_GAIN = 1 / 4
"""What it changes in its own besides: errors differ most between layers, little within one."""
START = 2.0
"""Floors that a missing token must weigh at first, to be waited for."""
LEAST = 1 / 16
"""The fewest. Below one, the floor itself is lowered. An error that is larger even so is reported."""


@dataclass
class Control:
    """Of each request and layer: how many floors a missing token must weigh for a step to wait for it.

    The more a step waits for, the smaller its error and the longer it takes. Less than one floor lowers the floor
    itself, for tokens in the pool too. After every audited case the number's logarithm falls by what the error is above
    what is aimed at, or rises by what it is below (Robbins and Monro, 1951), so that the mean error settles there. All
    of it is the request's own, so that no answer depends on who else runs.
    """

    target: float
    most: float
    """Never more floors than that."""
    layers: Sequence[int]
    _logs: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By sequence that was audited, `[layers]` float32."""

    def add(self, slot: int, layer: int, error: float) -> None:
        """A case of a sequence was found."""
        off = 1 - min(error / (AIM * self.target), LARGEST)
        logs = self._of(slot) + GAIN * off
        logs[self.layers.index(layer)] += LAYER_GAIN * off
        self._logs[slot] = logs.clamp(math.log(LEAST), math.log(self.most))

    def wait(self, slot: int, layer: int) -> float:
        """How many floors a token that a sequence lacks must weigh to be waited for in a layer."""
        return math.exp(float(self._of(slot)[self.layers.index(layer)]))

    def waits(self, slots: Sequence[int]) -> Tensor:
        """The same of every layer and of these sequences, `[layers, slots]` float32."""
        return torch.stack([self._of(slot) for slot in slots], 1).exp()

    def forget(self, slot: int) -> None:
        self._logs.pop(slot, None)

    def _of(self, slot: int) -> Tensor:
        found = self._logs.get(slot)
        return torch.full((len(self.layers),), math.log(min(START, self.most))) if found is None else found
