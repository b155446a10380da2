"""Mixtures of experts as Transformers' experts interface has them: which modules they are, and what a step reads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward

from coattn.hf.quantised.module import PackedExperts
from coattn.hf.stored import weight_bytes

GROUPED, COPYING = "grouped_mm", "batched_mm"
"""Implementations: one that reads each expert once, of those that tokens use, and one that copies the weights that each
token uses."""


class WeightsRead(NamedTuple):
    """Bytes of weights that decode steps read."""

    always: int
    of_experts: int
    """Of all experts together."""
    share: float
    """Of these, what one token uses."""

    def of(self, sequences: int) -> int:
        """By a step of so many sequences, if each chooses its experts by itself."""
        return self.always + round(self.of_experts * (1 - (1 - self.share) ** sequences))


def weights_read(model: nn.Module) -> WeightsRead:
    """What a decode step must read, of a model with experts or without."""
    total, experts = weight_bytes(model), list(filter(holds_experts, model.modules()))
    inside = sum(p.nbytes for module in experts for p in module.parameters())
    top, count = top_of(model), max((int(cast(Any, module).num_experts) for module in experts), default=1)
    return WeightsRead(total - inside, inside, min(1.0, top / count)) if top else WeightsRead(total, 0, 1.0)


def expert_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that hold experts."""
    return filter(is_experts, model.modules())


def is_experts(module: Any) -> bool:
    """Whether a module holds experts, under Transformers' experts interface."""
    return hasattr(module, "is_transposed") and isinstance(getattr(module, "down_proj", None), nn.Parameter)


def holds_experts(module: Any) -> bool:
    """Whether a module holds experts, packed or not."""
    return isinstance(module, PackedExperts) or is_experts(module)


def top_of(model: nn.Module) -> int | None:
    """How many experts a token uses; None where there are none."""
    found = (getattr(module, "top_k", None) for module in model.modules())
    return next((top for top in found if isinstance(top, int)), None)


def is_router(module: Any) -> bool:
    """Whether a module has a router's own weights: a row for each expert."""
    weight = getattr(module, "weight", None)
    has = isinstance(getattr(module, "top_k", None), int) and isinstance(weight, nn.Parameter) and weight.dim() == 2
    return has and not list(module.children())


def safely(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What a module of experts computes, without waiting for a GPU: the weights that each token uses are copied."""
    return cast("Tensor", batched_mm_experts_forward(module, x, index, weights))


def breaks_capture(x: Tensor) -> bool:
    """Whether a step is captured, on a GPU whose grouped products wait for it: PyTorch has kernels for bfloat16 on
    compute capability 9 and 10 alone."""
    if x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)


def grouped(model: nn.Module) -> AbstractContextManager[None]:
    """Experts on a GPU whose implementation is a loop or copies weights are grouped products inside this block."""
    there = [m for m in expert_modules(model) if m.down_proj.is_cuda and m.down_proj.dtype != torch.float64]
    return implemented(there, GROUPED, (None, "eager", COPYING))


@contextmanager
def implemented(modules: Iterable[Any], name: str, instead_of: Container[str | None] | None = None) -> Iterator[None]:
    """Modules of experts are computed by another of Transformers' implementations inside this block. instead_of: where
    it is one of these; None: everywhere."""
    configs = {id(module.config): module.config for module in modules}
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    try:
        for config, own in before:
            if instead_of is None or own in instead_of:
                config._experts_implementation_internal = name
        yield
    finally:
        for config, own in before:
            config._experts_implementation_internal = own
