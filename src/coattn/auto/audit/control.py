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
"""What a case changes everywhere."""
LAYER_GAIN = 1 / 4
"""What it changes in its layer: errors differ most between layers, little within one."""
START = 2.0
"""Floors that a missing token must weigh at first, to be waited for."""
LEAST = 1 / 16
"""The fewest. Below one, the floor itself is lowered. An error that is larger even so is reported."""


@dataclass
class Control:
    """Of each request and layer: how many floors a missing token must weigh for a step to wait for it.

    The more a step waits for, the smaller its error and the longer it takes. Less than one floor lowers the floor
    itself, for tokens in the pool too. After every audited case the number's logarithm falls by what the error is above
    what is aimed at, or rises by what it is below (Robbins and Monro, 1951), so that the mean error settles there. Most
    of a change is the layer's, for all requests; of the rest half is the request's own, and half the run's.
    """

    target: float
    most: float
    """Never more floors than that."""
    layers: dict[int, float]
    """How far each is from the run's, as a logarithm, as all of them; their mean is 0."""
    run: float = field(init=False)
    own: dict[int, float] = field(init=False, default_factory=dict)
    """How far sequences that were audited are from it."""

    def __post_init__(self) -> None:
        self.run = math.log(min(START, self.most))

    def add(self, slot: int, layer: int, error: float) -> None:
        """A case of a sequence was found."""
        off = 1 - min(error / (AIM * self.target), LARGEST)
        before, whole = math.log(self.wait(slot, layer)), GAIN + LAYER_GAIN
        change = (self._clamped(before + whole * off) - before) / whole
        self.layers[layer] += LAYER_GAIN * change
        self.own[slot] = self.own.get(slot, 0.0) + GAIN / 2 * change
        middle = sum(self.layers.values()) / len(self.layers)
        self.run += GAIN / 2 * change + middle
        self.layers = {name: x - middle for name, x in self.layers.items()}

    def wait(self, slot: int, layer: int) -> float:
        """How many floors a token that a sequence lacks must weigh to be waited for in a layer."""
        return math.exp(self._clamped(self.run + self.own.get(slot, 0.0) + self.layers[layer]))

    def waits(self, slots: Sequence[int]) -> Tensor:
        """The same of every layer and of these sequences, `[layers, slots]` float32."""
        own = torch.tensor([self.run + self.own.get(slot, 0.0) for slot in slots])
        layers = torch.tensor([*self.layers.values()])[:, None]
        return (own + layers).clamp(math.log(LEAST), math.log(self.most)).exp()

    def forget(self, slot: int) -> None:
        self.own.pop(slot, None)

    def _clamped(self, log: float) -> float:
        return min(max(log, math.log(LEAST)), math.log(self.most))
