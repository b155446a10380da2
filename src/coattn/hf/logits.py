"""Logits for many positions without holding them all: the model's head, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

CHUNK = 512
"""Positions per chunk: bounds the logits in memory to `CHUNK x vocabulary` floats."""


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden `[tokens, hidden_size]` from the decoder -> the model's logits `[tokens, vocabulary]`, in float32.

    By the model's own forward call, which scales and caps them as its family does, over a decoder that returns
    `hidden`. Only tensors are computed, so that it can be captured.
    """
    # with this one field more, the class of mixtures has all that any family's forward call looks for
    found: Any = MoeModelOutputWithPast(last_hidden_state=cast("Any", hidden[None]))
    found.cross_attentions = None
    decoder = model.get_decoder()
    copy = _stand_in(model, decoder, _Done(decoder, found))
    return cast("Tensor", type(model).forward(copy, return_dict=True).logits[0]).float()


class _Done:
    """A decoder that has run."""

    def __init__(self, decoder: nn.Module, output: Any) -> None:
        self.decoder, self.output = decoder, output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


def _stand_in(module: nn.Module, child: Any, by: Callable[..., Any]) -> Any:
    """The module with another child, at whatever depth: a shallow copy, since others may be using the model.

    None where the child is not in it.
    """
    if module is child:
        return by
    for name, each in module._modules.items():
        if each is None or isinstance(each, nn.ModuleList):  # a decoder is in no list
            continue
        made = _stand_in(each, child, by)
        if made is not None:
            copy = object.__new__(type(module))
            copy.__dict__ = {**module.__dict__, "_modules": {**module._modules, name: made}}
            return copy
    return None


def logit_chunks(model: PreTrainedModel, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`(first position, logits [chunk, vocabulary])` over hidden `[tokens, hidden_size]`."""
    for start in range(0, len(hidden), CHUNK):
        yield start, head(model, hidden[start : start + CHUNK])
