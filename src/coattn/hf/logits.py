"""Logits for many positions without holding them all: the model's head, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512
"""Positions per chunk: bounds the logits in memory to `CHUNK x vocabulary` floats."""


def head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """hidden `[tokens, hidden_size]` from the decoder -> the model's logits `[tokens, vocabulary]`, in float32."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits.float()


def logit_chunks(model: PreTrainedModel, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`(first position, logits [chunk, vocabulary])` over hidden `[tokens, hidden_size]`."""
    for start in range(0, len(hidden), CHUNK):
        yield start, head(model, hidden[start : start + CHUNK])
