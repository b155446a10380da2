"""Layers on several devices: where their weights lie, and what a forward call carries from one stage to the next.

Within a step the devices work one after another. What crosses a border is the hidden state of the step's tokens, and
what its layers are called with beside it (the rotation of queries and keys): `[tokens, hidden_size]` and a few small
tensors, once a step. Owner of what arrived: the receiving device. Writer: one copy, after the last kernel of the
stage before. Readers: the stage's layers, whose stream waits for the copy. The host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coattn.hf.architectures import layers_of
from coattn.hf.division import Division, modules_after
from coattn.hf.stored import move_buffers, move_parameter

Carry = Callable[[int, Tensor], Tensor]
"""`(stage, tensor of an earlier one) -> the same in this one`."""


class PipelineStages:
    """Runs a model whose layers are divided; `close` leaves it as it was.

    A head that shares its weights with the embedding gets a copy of them where the two lie on different devices.
    """

    def __init__(self, model: PreTrainedModel, division: Division) -> None:
        self.model, self.division = model, division
        self.carry: Carry = self._copy
        self.enter: Callable[[int], None] = self._set_device
        """Called when a forward call comes to the first layer of a stage after the first."""
        self._there: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity of a tensor: itself, and what arrived of it in the running stage."""
        self._undo = ExitStack()
        with torch.inference_mode(False), torch.no_grad():
            self._move()
        stages = division.stages
        for i, layer in enumerate(layers_of(model)):
            if stages[i]:
                first = stages[i] != stages[i - 1]
                hook = self._before(stages[i], first)
                self._undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

    @property
    def last(self) -> torch.device:
        """Where the logits come out."""
        return self.division.devices[-1]

    @contextmanager
    def through(self) -> Iterator[None]:
        """A forward call and its head run inside this block, also between two layers of another one; afterwards the
        device is what it was."""
        kept, self._there = self._there, {}
        before = torch.cuda.current_device() if self.last.type == "cuda" else 0
        self._set_device(0)
        try:
            yield
        finally:
            self._there = kept
            if self.last.type == "cuda":
                torch.cuda.set_device(before)

    @contextmanager
    def crossing(self, carry: Carry, enter: Callable[[int], None]) -> Iterator[None]:
        """Inside this block, somebody else carries tensors over, and is told when a stage begins."""
        before = self.carry, self.enter
        self.carry, self.enter = carry, enter
        try:
            yield
        finally:
            self.carry, self.enter = before

    def close(self) -> None:
        """Every parameter and buffer where it was before."""
        with torch.inference_mode(False), torch.no_grad():
            self._undo.close()

    def _move(self) -> None:
        """Layers and what runs after them to their devices, the rest to the first."""
        where: dict[nn.Module, torch.device] = {}
        for layer, stage in zip(layers_of(self.model), self.division.stages, strict=True):
            where |= dict.fromkeys(layer.modules(), self.division.devices[stage])
        for module in modules_after(self.model):
            where |= dict.fromkeys(module.modules(), self.last)
        seen: dict[nn.Parameter, torch.device] = {}
        for module in self.model.modules():
            device = where.get(module, self.division.devices[0])
            for name, parameter in module.named_parameters(recurse=False):
                if seen.setdefault(parameter, device).type != "cpu" and seen[parameter] != device:
                    self._undo.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = nn.Parameter(parameter.data.to(device), requires_grad=False)
                else:
                    move_parameter(parameter, device, self._undo)
            move_buffers(module, device, self._undo)
        if self.last.type == "cuda":
            torch.cuda.empty_cache()  # what has left a GPU is free for the KV

    def _before(self, stage: int, first: bool) -> Any:
        def call(_layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden: Tensor = args[0] if args else options["hidden_states"]
            if first:
                self._there.clear()
                self.enter(stage)
                hidden = self.carry(stage, hidden)
            beside = {name: self._brought(stage, x) for name, x in options.items() if name != "hidden_states"}
            rest = tuple(self._brought(stage, x) for x in args[1:])
            return ((hidden, *rest), beside) if args else ((), {"hidden_states": hidden, **beside})

        return call

    def _brought(self, stage: int, value: Any) -> Any:
        """Tensors that were made in the first stage, here; the same for every layer."""
        if isinstance(value, tuple | list):
            return type(value)(self._brought(stage, x) for x in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._there:
            self._there[id(value)] = value, self.carry(stage, value)
        return self._there[id(value)][1]

    def _copy(self, stage: int, tensor: Tensor) -> Tensor:
        return tensor.to(self.division.devices[stage], copy=True)

    def _set_device(self, stage: int) -> None:
        device = self.division.devices[stage]
        if device.type == "cuda":
            torch.cuda.set_device(device)
