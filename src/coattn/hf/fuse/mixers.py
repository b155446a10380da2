"""A gated delta rule's decode step in three kernels: one product of all that goes in, the rule, and a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.hf.fuse.forms import is_plain_linear, weight_of
from coattn.hf.fuse.siblings import Siblings
from coattn.hf.mixers import MixerForm, States
from coattn.kernels.delta_rule import DeltaWeights
from coattn.kernels.linear import linear

Step = Callable[[States, Tensor], Tensor]
"""`MixerForm.decode`, or what stands in for it."""


class Scratch(NamedTuple):
    """States of a few sequences to try a mixer's step with."""

    tensors: dict[str, Tensor]
    rows: tuple[Tensor, Tensor]

    def table(self, seqs: int) -> tuple[Tensor, Tensor]:
        return self.rows[0][:seqs], self.rows[1][:seqs]


def scratch(mixer: MixerForm, seqs: int, device: torch.device, dtype: torch.dtype) -> Scratch:
    """Random states, the same at every call; each sequence reads one row and writes another."""
    draws = torch.Generator(device).manual_seed(0)
    rows = torch.arange(2 * seqs, dtype=torch.int32, device=device).view(2, seqs)
    tensors = {
        name: torch.randn(2 * seqs, *shape, generator=draws, device=device).to(own or dtype)
        for name, (_, _, shape, own) in zip(mixer.names, mixer.mixer.states, strict=True)
    }
    return Scratch(tensors, (rows[0], rows[1]))


def tried(step: Step, store: Scratch, x: Tensor) -> tuple[Tensor, ...]:
    """What a step gives and what it leaves behind."""
    out = step(store, x)
    return (out, *store.tensors.values())


def delta_step(mixer: MixerForm, module: Any, fused: Sequence[Siblings]) -> Step | None:
    """The step of a module that has what a gated delta rule has; whether its numbers are right is still to be seen.

    fused: its projections that are one matrix.
    """
    kinds = {kind: (name, shape) for name, (kind, _, shape, _) in zip(mixer.names, mixer.mixer.states, strict=True)}
    needed = ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
    if len(fused) != 1 or len(fused[0].members) != 4 or len(kinds) != len(mixer.names) != 2:
        return None
    if kinds.keys() != {"conv", "recurrent"} or not all(hasattr(module, name) for name in needed):
        return None
    (conv, (channels, taps)), (state, shape) = kinds["conv"], kinds["recurrent"]
    sizes = [channels, shape[0] * shape[2], shape[0], shape[0]]
    fits = fused[0].sizes == sizes and tuple(module.conv1d.weight.shape) == (channels, 1, taps)
    if not fits or not is_plain_linear(module.out_proj) or shape[1] * shape[2] > LARGEST:
        return None

    def step(store: States, hidden: Tensor) -> Tensor:
        from coattn.kernels.triton.delta_rule import delta_rule

        norm = module.norm
        eps = float(norm.variance_epsilon)
        own = DeltaWeights(
            module.conv1d.weight[:, 0], module.conv1d.bias, module.A_log, module.dt_bias, norm.weight, eps
        )
        x = linear(hidden, fused[0].weight, fused[0].bias)
        rows = store.table(hidden.shape[1])
        out = delta_rule(x[0], own, store.tensors[conv], store.tensors[state], *rows)
        return linear(out[None], weight_of(module.out_proj), module.out_proj.bias)

    return step


LARGEST = 1 << 15
"""Numbers of a head's state, which lies in registers."""
