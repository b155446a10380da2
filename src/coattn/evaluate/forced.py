"""The protocol: prefill exactly, then decode under the method while the text says what comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.hf.attach import attach
from coattn.hf.logits import head, logit_chunks
from coattn.method import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
"""`(tokens done, tokens in all)`"""


@dataclass(frozen=True)
class Forced:
    """A text forced through a model under a method.

    losses: `[tokens - 1]` float64, negative log-likelihood of each token but the first.
    logits: `[decoded, vocabulary]` float32, the prediction after each decode step.
    """

    prefilled: int
    losses: Tensor
    logits: Tensor
    report: dict[str, Any]


@torch.inference_mode()
def force(
    model: PreTrainedModel,
    ids: Tensor,
    prefill: int,
    method: str | Method,
    gpu_kv: int | str | None = None,
    host_kv: int | str | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> Forced:
    """ids `[tokens]`: the first `prefill` in one exact prefill, the others one decode step each.

    Cost: holds the logits of the decode steps; those of the prefill are scored a chunk at a time.
    """
    device = model.get_input_embeddings().weight.device
    ids = ids.to(device)
    losses, kept = [], []
    with attach(model, method, gpu_kv=gpu_kv, host_kv=host_kv, **params) as attachment:
        cache = attachment.new_cache(len(ids))
        decoder = model.get_decoder()
        hidden = decoder(input_ids=ids[None, :prefill], past_key_values=cache, use_cache=True).last_hidden_state[0]
        for start, logits in logit_chunks(model, hidden):
            targets = ids[start + 1 : start + 1 + len(logits)]
            losses.append(_losses(logits[: len(targets)], targets))
        if progress:
            progress(prefill, len(ids))
        for i in range(prefill, len(ids)):
            hidden = decoder(input_ids=ids[None, i : i + 1], past_key_values=cache, use_cache=True).last_hidden_state[0]
            logits = head(model, hidden)
            kept.append(logits[0].cpu())
            if i + 1 < len(ids):
                losses.append(_losses(logits, ids[i + 1 : i + 2]))
            if progress:
                progress(i + 1, len(ids))
        report = attachment.report()
    return Forced(prefill, torch.cat(losses), torch.stack(kept) if kept else torch.empty(0, 0), report)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu()
