"""Which layers lie on which device: consecutive ones, so that a step goes over each border once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from coattn.errors import ConfigError
from coattn.hf.architectures import layers_of
from coattn.hf.load import choose_device
from coattn.hf.stored import bytes_of

LAST = ("norm", "final_layer_norm", "project_out")
"""Of a decoder's own modules, those that run after its layers."""


@dataclass(frozen=True)
class Division:
    """Devices, and how many layers lie on each; a device may be there twice."""

    devices: tuple[torch.device, ...]
    layers: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """By layer: the device it lies on, counted from zero."""
        return tuple(k for k, count in enumerate(self.layers) for _ in range(count))

    @property
    def names(self) -> tuple[str, ...]:
        """As people know them: `cuda:0`, and `cuda:0#2` where it is there again."""
        found: list[str] = []
        for device in map(str, self.devices):
            again = sum(name.partition("#")[0] == device for name in found)
            found.append(f"{device}#{again + 1}" if again else device)
        return tuple(found)

    def spans(self) -> list[tuple[int, int]]:
        """`[first, last]` layer of each device."""
        ends = [sum(self.layers[: k + 1]) for k in range(len(self.layers))]
        return [(end - count, end - 1) for end, count in zip(ends, self.layers, strict=True)]


def choose_devices(devices: Sequence[str | torch.device]) -> tuple[torch.device, ...]:
    """Devices by name, all GPUs or all `cpu:N`: those are one CPU, and stand for devices where there are none."""
    if isinstance(devices, str) or not devices:
        raise ConfigError(f"devices is {devices!r}, but must be a list.", 'Give it like ["cuda:0", "cuda:1"].')
    if all(str(name).partition(":")[0] == "cpu" for name in devices):
        try:
            return tuple(torch.device(name) for name in devices)
        except RuntimeError:
            raise ConfigError(f"{devices!r} are not devices.", 'Give them like ["cpu:0", "cpu:1"].') from None
    found = tuple(choose_device(name) for name in devices)
    if len({device.type for device in found}) > 1:
        raise ConfigError(
            f"The devices are {', '.join(map(str, devices))}, but layers lie on GPUs or on the CPU, not on both.",
            "Leave the CPU out: a method such as cpu makes use of it.",
        )
    return tuple(torch.device(d.type, torch.cuda.current_device() if d.index is None else d.index) for d in found)


def choose_shares(shares: Sequence[float] | None, devices: int) -> tuple[float, ...]:
    """How much of the bytes each device is to hold; left out, the same."""
    if shares is None:
        return (1 / devices,) * devices
    if len(shares) != devices:
        raise ConfigError(f"There are {len(shares)} device_shares for {devices} devices.", "Give one for each.")
    wrong = next((s for s in shares if isinstance(s, bool) or not isinstance(s, int | float) or not 0 < s < 1e9), None)
    if wrong is not None:
        raise ConfigError(f"device_shares has {wrong!r}, which is no share.", "Give numbers above 0, like 3,1.")
    return tuple(share / sum(shares) for share in shares)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights: of each layer, before the layers and after them."""

    layers: tuple[int, ...]
    first: int
    last: int

    def on_each(self, division: Division) -> list[int]:
        """What each device holds of them."""
        held = [sum(self.layers[first : last + 1]) for first, last in division.spans()]
        held[0] += self.first
        held[-1] += self.last
        return held


def sizes(model: PreTrainedModel) -> Sizes:
    """model: may be on a device without memory. A head that is tied to the embedding counts on both sides."""
    layers, ends = layers_of(model), modules_after(model)
    own = {p for module in (*layers, *ends) for p in module.parameters()}
    tied = sum(p.nbytes for p in model.get_input_embeddings().parameters() if p in own)
    first = sum(p.nbytes for p in model.parameters() if p not in own) + tied
    return Sizes(tuple(map(bytes_of, layers)), first, sum(map(bytes_of, ends)))


def divide(weights: Sizes, kv: Sequence[int], devices: Sequence[torch.device], shares: Sequence[float]) -> Division:
    """Consecutive layers, so that the device that is fullest for its share is as empty as can be.

    kv: bytes in the GPU tier of each layer.
    """
    costs = [w + own for w, own in zip(weights.layers, kv, strict=True)]
    n, count = len(costs), len(devices)
    if count > n:
        raise ConfigError(f"There are {count} devices for {n} layers.", f"Give {n} or fewer.")
    sums = [sum(costs[:i]) for i in range(n + 1)]

    def load(k: int, start: int, end: int) -> float:
        ends = (weights.first if k == 0 else 0) + (weights.last if k == count - 1 else 0)
        return (sums[end] - sums[start] + ends) / shares[k]

    # best[i]: of the devices so far, with i layers on them: the fullest one's load, and how many layers each has
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for k in range(count):
        step: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (fullest, taken) in best.items():
            for end in range(start + 1, n - (count - 1 - k) + 1):
                found = (max(fullest, load(k, start, end)), (*taken, end - start))
                if end not in step or found[0] < step[end][0]:
                    step[end] = found
        best = step
    return Division(tuple(devices), best[n][1])


def modules_after(model: PreTrainedModel) -> list[nn.Module]:
    """What runs after the layers: the last norm and the head."""
    decoder: Any = model.get_decoder()
    found = [getattr(decoder, name, None) for name in LAST]
    return [*(module for module in found if isinstance(module, nn.Module)), model.get_output_embeddings()]
