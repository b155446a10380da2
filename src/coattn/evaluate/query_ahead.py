"""How well a layer's query is known one layer ahead (ScoutAttention, Algorithm 1, line 4, and Table 1).

The prediction applies the next layer's query projection to this layer's input. The paper writes `W_Q X`; the faithful
form also applies the next layer's input norm (and query norm, where the model has one) and RoPE. Each of the two is
measured with and without, always against the query that the attention really uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from coattn.errors import UnsupportedError
from coattn.evaluate.look import Shown
from coattn.hf.architectures import attention_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANTS = {"norm_rope": (True, True), "norm": (True, False), "rope": (False, True), "neither": (False, False)}
"""Name -> whether the input norm and RoPE are applied to the prediction."""
NORMS = ("input_layernorm", "self_attn_layer_norm")


class QueryAhead:
    """Predicts every layer's query from the layer before, by running the real attention module on the wrong input."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = attention_modules(model)
        self.layers = [_parent(model, module) for module in self.modules]
        self.norms = [_norm(layer) for layer in self.layers]
        self.runtime: Shown | None = None
        self._inputs: dict[int, Tensor] = {}
        self._predicted: dict[int, dict[str, Tensor]] = {}
        self._found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in VARIANTS}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside this block, decode steps of the model under `runtime` are measured."""
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
        if self.runtime is not None and self.runtime.decoding():
            self._inputs[i] = args[0] if args else kwargs["hidden_states"]

    def _predict(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runtime = self.runtime
        if i == 0 or runtime is None or not runtime.decoding():
            return
        here: Tensor = args[0] if args else kwargs["hidden_states"]
        before = self._inputs[i - 1].to(here.device)
        plain, normed = before, self.norms[i](before)
        caught: list[Tensor] = []
        runtime.caught = caught
        try:
            for norm, rope in VARIANTS.values():
                call = kwargs if rope else _without_rope(kwargs)
                hidden = normed if norm else plain
                if args:
                    self.modules[i].forward(hidden, *args[1:], **call)
                else:
                    self.modules[i].forward(**{**call, "hidden_states": hidden})
        finally:
            runtime.caught = None
        self._predicted[i] = dict(zip(VARIANTS, caught, strict=True))


def _without_rope(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same call with rotations by nothing; unchanged for models without RoPE."""
    if kwargs.get("position_embeddings") is None:
        return kwargs
    cos, sin = kwargs["position_embeddings"]
    return {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def _at(i: int, hook: Any) -> Any:
    def call(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook(i, args, kwargs)

    return call


def _parent(model: PreTrainedModel, module: nn.Module) -> nn.Module:
    """The decoder layer that an attention module belongs to."""
    for layer in model.get_decoder().modules():
        if any(child is module for child in layer.children()):
            return cast("nn.Module", layer)
    raise AssertionError("attention_modules() found it in the decoder")


def _norm(layer: nn.Module) -> nn.Module:
    for name in NORMS:
        if isinstance(getattr(layer, name, None), nn.Module):
            return cast("nn.Module", getattr(layer, name))
    raise UnsupportedError(
        f"{type(layer).__name__} has no input norm that is known by name.", f"Known: {', '.join(NORMS)}."
    )
