"""Queries one layer ahead (ScoutAttention, section 3.3): the next layer's query, made of this layer's input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.architectures import attention_layers, attention_modules, describe_layers
from coattn.hf.attention import ModelUser, pack
from coattn.hf.families import positions
from coattn.hf.probe import look_at, mixers_of, routed_to
from coattn.hf.query import norms_of, not_known, query_of, rope_of


class Ahead:
    """Predicts a layer's query by its own norm, projection and rotation, applied to the input of the layer before.

    The residual stream changes little from layer to layer; how little, `coattn eval attention` measures.
    """

    def __init__(self, model: PreTrainedModel, tried: Sequence[int] | None = None) -> None:
        """tried: the layers to compare with `query_of`, if not all; only these can be predicted then."""
        if mixers_of(model):
            raise UnsupportedError(
                f"Models of family {model.config.model_type!r} have layers with a state between those that attend, and "
                "this method predicts queries one layer ahead.",
                "Choose a method that does not, such as cpu or auto.",
            )
        self.model, self.shapes = model, describe_layers(model)
        self.modules = attention_modules(model)
        self.layers = attention_layers(model)
        self.norms = norms_of(model)
        self.scales = [seen.scale for seen in look_at(model)]
        self.turns = self._check(range(len(self.shapes)) if tried is None else tried)

    @torch.no_grad()
    def _check(self, layers: Sequence[int]) -> dict[int, bool]:
        """Of each layer, whether its queries are turned by their positions: its module is run on a random input.

        Raises UnsupportedError where the module makes other queries than `query_of`.
        """
        most, random = positions(self.model.config) or 512, torch.Generator().manual_seed(0)
        given = torch.randn(1, 2, int(self.model.config.hidden_size), generator=random)
        ids, turns, made = torch.tensor([[most - 2, most - 1]]), dict[int, bool](), list[Tensor]()

        def keep(_: Any, query: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
            made.append(query)
            return query.transpose(1, 2), None

        for i in layers:
            module, shape = self.modules[i], self.shapes[i]
            x, at = given.to(shape.device, shape.dtype), ids.to(shape.device)
            try:
                rope = rope_of(self.model, i, x, {"position_ids": at})
                call = {"hidden_states": x, "position_embeddings": rope, "position_ids": at, "attention_mask": None}
                with routed_to(module.config, keep):
                    module(**call)
                fits = [_near(query_of(module, shape, x, r), made[-1]) for r in ([rope, None] if rope else [None])]
            except Exception as error:  # the module is another family's, and may want anything
                raise not_known(self.model) from error
            if not any(fits):
                raise not_known(self.model)
            turns[i] = rope is not None and fits[0]
        return turns

    def predict(self, layer: int, hidden: Tensor, options: dict[str, Any], norm: int) -> Tensor:
        """hidden `[batch, t, hidden_size]`, the input of the layer before, and the options of its call ->
        `[batch, q_heads, t, d]`. norm: the layer under whose input norm.
        """
        device = self.shapes[layer].device
        rope = rope_of(self.model, layer, hidden, options) if self.turns[layer] else None
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


def _near(x: Tensor, y: Tensor) -> bool:
    """bfloat16 rounds to 0.4%."""
    return x.shape == y.shape and bool((x - y).norm() <= 0.02 * y.norm())
