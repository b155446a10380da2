"""Logits for many positions without holding them all: the model's head, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512
"""Positions per chunk: bounds the logits in memory to `CHUNK x vocabulary` floats."""


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden `[tokens, hidden_size]` from the decoder -> the model's logits `[tokens, vocabulary]`, in float32.

    By the model's own forward call, which scales and caps them as its family does, over a decoder that returns
    `hidden`. Only tensors are computed, so that it can be captured.
    """
    # the class of mixtures has every field that any family's forward call looks for
    found = MoeModelOutputWithPast(last_hidden_state=cast("Any", hidden[None]))
    stand_in = _replaced(model, model.get_decoder(), lambda *_, **__: found)
    return cast("Tensor", type(model).forward(stand_in, return_dict=True).logits[0]).float()


def _replaced(module: nn.Module, child: nn.Module, by: Callable[..., Any]) -> Any:
    """The module with another child, at whatever depth: a shallow copy, since others may be using the model."""
    if module is child:
        return by
    made = object.__new__(type(module))
    found = {name: _replaced(each, child, by) for name, each in module._modules.items() if _within(child, each)}
    made.__dict__ = {**module.__dict__, "_modules": {**module._modules, **found}}
    return made


def _within(child: nn.Module, module: nn.Module | None) -> bool:
    """Whether the child is the module, or is in it outside of lists: decoders are."""
    if module is None or isinstance(module, nn.ModuleList):
        return False
    return module is child or any(_within(child, each) for each in module._modules.values())


def logit_chunks(model: PreTrainedModel, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`(first position, logits [chunk, vocabulary])` over hidden `[tokens, hidden_size]`."""
    for start in range(0, len(hidden), CHUNK):
        yield start, head(model, hidden[start : start + CHUNK])
