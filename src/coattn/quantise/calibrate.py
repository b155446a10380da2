"""Codebooks from a text: a model reads some of it, and the keys of each layer are clustered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.hf.attach import Attachment, attach
from coattn.quantise.codebook import Codebook, fit
from coattn.runtime import Runtime

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""`(what, done, of how many)`"""


class Collected(Runtime):
    """Full attention that also keeps every key it is given, after RoPE."""

    def __init__(self, attachment: Attachment, seqs: int, tokens: int | None, keys: list[list[Tensor]]) -> None:
        super().__init__(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens)
        self.keys = keys

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.keys[layer].append(k.flatten(0, 1).cpu())
        return super().attend(layer, q, k, v, scale)


def choose_samples(ids: Tensor, samples: int, length: int, seed: int) -> list[Tensor]:
    """Stretches of a text `[tokens]`, drawn at random without overlap as far as the text allows; all of a short one."""
    length = min(length, len(ids))
    room = len(ids) - samples * length
    if room <= 0:
        return list(torch.split(ids, length))[:samples]
    starts = torch.randint(0, room + 1, (samples,), generator=torch.Generator().manual_seed(seed)).sort().values
    return [ids[s + i * length : s + (i + 1) * length] for i, s in enumerate(starts.tolist())]


@torch.inference_mode()
def collect(model: PreTrainedModel, samples: list[Tensor], progress: Progress | None = None) -> list[Tensor]:
    """The keys of every layer, `[keys, head_dim]` each, in host memory. Cost: one prefill a sample."""
    with attach(model, "full") as attachment:
        keys: list[list[Tensor]] = [[] for _ in attachment.layers]
        for i, sample in enumerate(samples):
            cache = attachment.new_cache(len(sample))
            cache.conversation.new_runtime = lambda seqs, tokens: Collected(attachment, seqs, tokens, keys)
            ids = sample[None].to(model.get_input_embeddings().weight.device)
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            cache.conversation.close()
            if progress:
                progress("samples read", i + 1, len(samples))
    return [torch.cat(found) for found in keys]


def fit_layers(
    keys: list[Tensor], groups: int, count: int, *, shared: bool, seed: int, progress: Progress | None = None
) -> dict[int, Codebook]:
    """A codebook of each layer's keys `[keys, head_dim]`."""

    def each() -> Iterator[tuple[int, Codebook]]:
        for i, found in enumerate(keys):
            yield i, fit(found, groups, count, shared=shared, seed=seed)
            if progress:
                progress("layers clustered", i + 1, len(keys))

    return dict(each())
