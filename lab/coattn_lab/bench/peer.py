"""Transformers' own decode over its own caches, filled without a prefill: what coattn is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from coattn.hf.architectures import describe_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEERS = ("transformers-full", "transformers-offload")


def peer_step(model: PreTrainedModel, name: str, batch: int, context: int) -> Callable[[], object]:
    """One decode step of `batch` sequences after `context` tokens; each call adds a token."""
    cache = DynamicCache(config=model.config, offloading=name == "transformers-offload")
    for i, shape in enumerate(describe_layers(model)):
        size = (batch, shape.kv_heads, context, shape.head_dim)
        k, v = (torch.randn(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
        cache.update(k, v, i)
        del k, v
    token = torch.ones(batch, 1, dtype=torch.long, device=next(model.parameters()).device)

    @torch.no_grad()
    def step() -> object:
        return model(token, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()

    return step
