"""Queries one layer ahead (ScoutAttention, section 3.3): the next layer's query, made of this layer's input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.architectures import TURNED, attention_modules, describe_layers, layers_of
from coattn.hf.attention import ModelUser, pack
from coattn.hf.query import norm_of, query_of, rope_of, scale_of


class Ahead:
    """Predicts a layer's query by its own norm, projection and rotation, applied to the input of the layer before.

    The residual stream changes little from layer to layer; how little, `coattn eval attention` measures.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.config.model_type not in TURNED:
            raise UnsupportedError(
                f"How models of family {model.config.model_type!r} make their queries is not known, and this method "
                "predicts queries one layer ahead.",
                "Choose a method that does not, such as cpu or auto.",
            )
        self.model, self.shapes = model, describe_layers(model)
        self.modules = attention_modules(model)
        self.layers = layers_of(model)
        self.norms = [norm_of(layer) for layer in self.layers]
        self.scales = [scale_of(*pair) for pair in zip(self.modules, self.shapes, strict=True)]

    def predict(self, layer: int, hidden: Tensor, options: dict[str, Any], norm: int) -> Tensor:
        """hidden `[batch, t, hidden_size]`, the input of the layer before, and the options of its call ->
        `[batch, q_heads, t, d]`. norm: the layer under whose input norm.
        """
        device = self.shapes[layer].device
        rope = rope_of(self.model, layer, hidden, options)
        there = None if rope is None else (rope[0].to(device), rope[1].to(device))
        fused = getattr(self.layers[layer].forward, "query", None)
        under = getattr(self.layers[norm].forward, "norms", None)
        if fused is not None and under is not None:
            return cast("Tensor", fused(hidden, there, under[0]))
        normed = self.norms[norm](hidden.to(self.shapes[norm].device))
        return query_of(self.modules[layer], self.shapes[layer], normed.to(device), there)

    @contextmanager
    def hooked(self, user: ModelUser) -> Iterator[None]:
        """Inside this block, the runtime that runs `user`'s attention hears each layer's query one layer ahead."""
        with ExitStack() as undo:
            for i, layer in enumerate(self.layers[:-1]):
                undo.callback(layer.register_forward_pre_hook(self._hook(i + 1, user), with_kwargs=True).remove)
            yield

    def _hook(self, following: int, user: ModelUser) -> Any:
        def call(_layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            runtime: Any
            runtime, running = user.call
            if running is None or not hasattr(runtime, "predict") or not runtime.predicts(running, following):
                return
            hidden: Tensor = args[0] if args else options["hidden_states"]
            with torch.no_grad(), runtime.side_stream(running, following, hidden):
                norm = runtime.norm_layer(following)
                q = pack(self.predict(following, hidden, options, norm), user.tokens)
                runtime.predict(running, following, q, self.scales[following])

        return call
