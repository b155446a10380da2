"""How well a layer's query is known one layer ahead (ScoutAttention, Algorithm 1, line 4, and Table 1).

The prediction applies the next layer's query projection to this layer's input. The paper writes `W_Q X`; the faithful
form also applies the next layer's input norm (and query norm, where the model has one) and RoPE. Each of the two is
measured with and without, always against the query that the attention really uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coattn.hf.architectures import attention_layers, attention_modules, describe_layers
from coattn.hf.query import norms_of, query_of
from coattn_lab.evaluate.look import Shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANTS = {"norm_rope": (True, True), "norm": (True, False), "rope": (False, True), "neither": (False, False)}
"""Name -> whether the input norm and RoPE are applied to the prediction."""


class QueryAhead:
    """Predicts every layer's query from the input of the layer before, and compares it with the real one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = attention_modules(model)
        self.shapes = describe_layers(model)
        self.layers = attention_layers(model)
        self.norms = norms_of(model)
        self.shown: Shown | None = None
        self._inputs: dict[int, Tensor] = {}
        self._predicted: dict[int, dict[str, Tensor]] = {}
        self._found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in VARIANTS}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside this block, decode steps of the model that are shown are measured."""
        with ExitStack() as undo:
            for i, (layer, module) in enumerate(zip(self.layers, self.modules, strict=True)):
                for each, hook in ((layer, self._keep), (module, self._predict)):
                    undo.callback(each.register_forward_pre_hook(_at(i, hook), with_kwargs=True).remove)
            yield

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        for name, guess in self._predicted.pop(layer, {}).items():
            cosine = torch.cosine_similarity(guess.double(), q.double(), dim=-1).mean()
            self._found[name].setdefault(layer, []).append(cosine)

    def summary(self) -> dict[str, Any]:
        """Per variant: the mean cosine over heads, steps and layers, and of each layer; the first has none."""
        found: dict[str, Any] = {}
        for name, layers in self._found.items():
            means = [torch.stack(layers[i]).mean().item() for i in sorted(layers)]
            found[name] = {"mean": sum(means) / len(means) if means else None, "layers": [None, *means]}
        return found

    def _keep(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.shown is not None and self.shown.decoding():
            self._inputs[i] = args[0] if args else kwargs["hidden_states"]

    def _predict(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if i == 0 or self.shown is None or not self.shown.decoding():
            return
        here: Tensor = args[0] if args else kwargs["hidden_states"]
        before = self._inputs[i - 1].to(here.device)
        normed, rope = self.norms[i](before), kwargs.get("position_embeddings")
        found = {}
        for name, (norm, rotated) in VARIANTS.items():
            angles = rope if rotated or rope is None else (torch.ones_like(rope[0]), torch.zeros_like(rope[1]))
            q = query_of(self.modules[i], self.shapes[i], normed if norm else before, angles)
            found[name] = q.transpose(1, 2).flatten(0, 1)
        self._predicted[i] = found


def _at(i: int, hook: Any) -> Any:
    def call(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook(i, args, kwargs)

    return call
