"""InfiniGen's skew of every layer, from one forward pass over a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.hf.attach import attach
from coattn.kernels.quantise.skew import Skew, skew_of
from coattn.step.probe import Probe
from coattn.types import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.2
"""Of the columns, for which the share of the queries' length is told."""


class Skewing(Probe):
    """The skew of each layer's queries, and the share of their squared length in the best columns."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Skew, float]] = {}

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        made = skew_of(q, k.shape[1])
        columns = made.columns(max(1, int(SHARE * q.shape[-1])))
        grouped = q.float().view(len(q), k.shape[1], -1, q.shape[-1])
        inside = torch.einsum("thgd,hdc->thgc", grouped, columns).square().sum()
        self.found[layer] = Skew(made.matrix.cpu(), made.order.cpu()), float(inside / grouped.square().sum())


@torch.inference_mode()
def read_skews(model: PreTrainedModel, ids: Tensor) -> list[tuple[Skew, float]]:
    """By layer: the skew that a text `[tokens]` gives, and how much a fifth of the columns holds. Cost: one prefill."""
    with attach(model, "full") as attachment:
        probe = Skewing()
        attachment.probes.append(probe)
        cache = attachment.new_cache(len(ids))
        there = ids[None].to(model.get_input_embeddings().weight.device)
        model.get_decoder()(input_ids=there, past_key_values=cache, use_cache=True)
        cache.conversation.close()
    return [probe.found[layer] for layer in range(len(probe.found))]
