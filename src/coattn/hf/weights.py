"""A share of the layers' weights in DRAM, brought in while earlier layers compute (FlexGen; HGCA, Figure 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coattn.cache.host_memory import host_memory
from coattn.errors import ConfigError
from coattn.hf.architectures import layers_of
from coattn.hf.fuse.forms import replaced
from coattn.hf.fuse.siblings import projections
from coattn.hf.stored import bytes_of, is_plain, move_buffers, move_parameter, stored

SLOTS = 2
"""Layers' worth of staging memory on the GPU: one is computed with while the next comes in."""
ALIGNED = 256


@dataclass(frozen=True)
class Split:
    """Which layers' weights stay on the GPU, and how many bytes lie where."""

    staged: tuple[int, ...]
    """Layers whose weights lie in DRAM, spread evenly over the model."""
    gpu_bytes: int
    """Weights in GPU memory: embeddings, head, layers that stay, staging memory."""
    host_bytes: int
    """Weights in DRAM. Each step, of decode or of a prompt, brings all of them over PCIe."""


def split(model: PreTrainedModel, share: float) -> Split:
    """How the weights lie when GPU memory holds `share` of the layers', staging memory included.

    At least the staging memory is on the GPU. model: may be on a device without memory.
    """
    layers = layers_of(model)
    stay = max(0, int(share * len(layers)) - SLOTS)
    n = len(layers) - stay
    if n <= SLOTS:
        return Split((), bytes_of(model), 0)
    staged = tuple(i for i in range(len(layers)) if (i + 1) * n // len(layers) > i * n // len(layers))
    sizes = [bytes_of(layers[i]) for i in staged]
    gpu = bytes_of(model) - sum(sizes) + SLOTS * max(sizes)
    return Split(staged, gpu, sum(sizes))


@dataclass(frozen=True)
class Piece:
    """Where a parameter lies in its layer's stretch of bytes."""

    parameter: nn.Parameter
    start: int
    home: torch.device

    def within(self, memory: Tensor) -> Tensor:
        """The parameter's numbers in such a stretch, a view."""
        p = self.parameter
        return memory[self.start : self.start + p.nbytes].view(p.dtype).view(p.shape)

    def give_back(self, kept: Tensor) -> None:
        """The parameter has memory of its own again, where it was before. kept: its numbers in DRAM."""
        del self.parameter.on_host  # type: ignore[attr-defined]
        self.parameter.data = kept.to(self.home)


class StagedWeights:
    """Runs a model whose weights are split; `close` leaves it as it was.

    Each staged layer's weights are one stretch of host memory, and its parameters are views of a slot of staging
    memory: the same addresses at every step, so that steps can be captured. The staged layers take the slots in turn.

    Owner: this object. Writer of a slot: the copy of the layer that is next in it, on a side stream, after the last
    kernel of the layer before in the slot (the side stream waits for the layers' stream there). Reader: the layer's
    kernels, after its copy (the layers' stream waits for an event). Between steps slot k holds the k-th staged layer,
    and no copy is on its way, however the step ended: a captured step has no copies for these layers.

    A step may run inside a layer of another one, as long as both run layer by layer: the inner one gives the slots back
    as it found them. A captured step cannot, so engines with staged weights run none between the layers of a prompt.
    """

    def __init__(self, model: PreTrainedModel, share: float, device: torch.device) -> None:
        self.device, self.split = device, split(model, share)
        self.decoder: Any = model.get_decoder()
        staged = [layers_of(model)[i] for i in self.split.staged]
        _refuse_packed(staged)
        self._pieces = [list(_pieces(layer)) for layer in staged]
        self._undo = ExitStack()
        self._running = False
        self._events: dict[int, Any] = {}
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.inference_mode(False), torch.no_grad():
            moving = {piece.parameter for pieces in self._pieces for piece in pieces}
            for parameter in model.parameters():
                if parameter not in moving:
                    move_parameter(parameter, device, self._undo)
            for module in model.modules():
                move_buffers(module, device, self._undo)
            self.sizes = [max(p.start + p.parameter.nbytes for p in pieces) for pieces in self._pieces]
            aligned = [_up(n) for n in self.sizes]
            stretches = torch.split(host_memory(sum(aligned), device), aligned)
            self.host = [stretch[:n] for stretch, n in zip(stretches, self.sizes, strict=True)]
            size = SLOTS if staged else 0, max(self.sizes, default=0)
            self.slots = torch.zeros(size, dtype=torch.uint8, device=device)
            for j, pieces in enumerate(self._pieces):
                for piece in pieces:
                    kept = piece.within(self.host[j])
                    kept.copy_(piece.parameter.data)
                    piece.parameter.on_host = kept  # type: ignore[attr-defined]
                    piece.parameter.data = piece.within(self.slots[j % SLOTS])
                    self._undo.callback(piece.give_back, kept)
        self.held = [-1] * len(self.slots)
        """By slot: the staged layer whose weights it has, or will have when what was started is done."""
        for j in range(len(self.slots)):
            self._copy(j)
        for j, layer in enumerate(staged):
            self._undo.callback(layer.register_forward_pre_hook(self._before(j)).remove)
            self._undo.callback(layer.register_forward_hook(self._after(j)).remove)
        if staged:  # not a hook: those are left out after an interrupt
            self._undo.enter_context(replaced(self.decoder, self._step(self.decoder.forward)))

    def close(self) -> None:
        """Every parameter and buffer where it was before, as far as that device has room."""
        with torch.inference_mode(False), torch.no_grad():
            self._undo.close()
        self._pieces = []
        self.slots = self.slots[:0]

    def report(self) -> dict[str, int]:
        """Bytes of weights in each tier, and what a step moves."""
        at = self.split
        return {"weights_gpu": at.gpu_bytes, "weights_host": at.host_bytes, "weights_moved": at.host_bytes}

    def _step(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The decoder's forward call, after which the slots are as the next step, or the one around it, needs them."""

        @wraps(forward)
        def step(*args: Any, **options: Any) -> Any:
            inside, before = self._running, list(self.held)
            self._running = True
            try:
                return forward(*args, **options)
            finally:
                self._running = inside
                self._hold(before if inside else range(len(self.slots)))

        return step

    def _hold(self, layers: Iterable[int]) -> None:
        """These staged layers, one for each slot, are in them, and no copy is on its way."""
        self._join()
        for j in layers:
            if self.held[j % SLOTS] != j:
                self._copy(j)

    def _join(self) -> None:
        """What follows on the current stream comes after every copy that nobody has waited for."""
        for ready in self._events.values():
            torch.cuda.current_stream(self.device).wait_event(ready)
        self._events.clear()

    def _before(self, j: int) -> Any:
        def wait(*_: Any) -> None:
            ready = self._events.pop(j, None)
            if ready is not None:
                torch.cuda.current_stream(self.device).wait_event(ready)
            if self.held[j % SLOTS] != j:  # a layer called by itself, or after a step that ran inside another
                self._join()
                self._copy(j)

        return wait

    def _after(self, j: int) -> Any:
        following = j + SLOTS if j + SLOTS < len(self.sizes) else j % SLOTS

        def fetch(*_: Any) -> None:
            if not self._running or following == j:
                return
            if self._side is None:
                self._copy(following)
                return
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                self._copy(following)
                ready = self._side.record_event()
            self._events[following] = ready

        return fetch

    def _copy(self, j: int) -> None:
        slot = j % SLOTS
        self.held[slot] = -1  # neither, should this be interrupted
        self.slots[slot][: self.sizes[j]].copy_(self.host[j], non_blocking=True)
        self.held[slot] = j


def _refuse_packed(layers: Iterable[nn.Module]) -> None:
    """Raises ConfigError where weights are not parameters whose bytes can be copied."""
    for name, weight in (each for layer in layers for each in stored(layer)):
        if type(weight) is not nn.Parameter and not is_plain(weight):
            form = type(weight).__name__ if isinstance(weight, nn.Parameter) else "buffers"
            raise ConfigError(
                f"weights_on_gpu is given, but the weights of {name} are quantised in a form ({form}) that cannot be "
                "moved layer by layer.",
                "Leave weights_on_gpu out, or load the model without quantisation or in FP8.",
            )


def _pieces(layer: nn.Module) -> Iterator[Piece]:
    """A layer's parameters, one after another; those that are fused into one matrix without a gap."""
    at, seen = 0, set[nn.Parameter]()
    for run in (*_fused(layer), *([p] for p in layer.parameters())):
        if seen.isdisjoint(run):
            at = _up(at)
            for parameter in run:
                yield Piece(parameter, at, parameter.device)
                at += parameter.nbytes
            seen.update(run)


def _fused(layer: nn.Module) -> Iterator[Sequence[nn.Parameter]]:
    for module in layer.modules():
        for members in projections(module):
            yield [m.get_parameter("weight") for m in members]
            if all(m.bias is not None for m in members):
                yield [m.get_parameter("bias") for m in members]


def _up(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED
