"""Codebooks from a text: a model reads some of it, and the keys of each layer are clustered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.hf.attach import attach
from coattn.kernels.quantise.basis import fit_basis
from coattn.kernels.quantise.codebook import Codebook, fit
from coattn.step.probe import Probe
from coattn.types import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""`(what, done, of how many)`"""


@dataclass
class Sampled:
    """What a layer saw of a text, in host memory."""

    kept: list[Tensor] = field(default_factory=list)
    moments: Tensor | float = 0.0
    queries: int = 0

    def add(self, q: Tensor, k: Tensor) -> None:
        """q `[tokens, q_heads, d]`, k `[tokens, kv_heads, d]`, after RoPE."""
        self.kept.append(k.cpu())
        grouped = q.double().view(len(q), k.shape[1], -1, k.shape[2])
        self.moments = self.moments + torch.einsum("thxd,thxe->hde", grouped, grouped).cpu()
        self.queries += len(q) * grouped.shape[2]

    @property
    def keys(self) -> Tensor:
        """`[tokens, kv_heads, d]`"""
        return torch.cat(self.kept)

    @property
    def moment(self) -> Tensor:
        """`[kv_heads, d, d]`: the mean of `q q^T` over the queries of each KV head."""
        assert isinstance(self.moments, Tensor), "nothing was added"
        return self.moments / self.queries


class Collected(Probe):
    """Keeps every key, after RoPE, and what queries are like."""

    def __init__(self, layers: int) -> None:
        self.found = [Sampled() for _ in range(layers)]

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.found[layer].add(q, k)


def choose_samples(ids: Tensor, samples: int, length: int, seed: int) -> list[Tensor]:
    """Stretches of a text `[tokens]`, drawn at random without overlap as far as the text allows; all of a short one."""
    length = min(length, len(ids))
    room = len(ids) - samples * length
    if room <= 0:
        return list(torch.split(ids, length))[:samples]
    starts = torch.randint(0, room + 1, (samples,), generator=torch.Generator().manual_seed(seed)).sort().values
    return [ids[s + i * length : s + (i + 1) * length] for i, s in enumerate(starts.tolist())]


@torch.inference_mode()
def collect(model: PreTrainedModel, samples: list[Tensor], progress: Progress | None = None) -> list[Sampled]:
    """The keys of every layer. Cost: one prefill a sample."""
    with attach(model, "full") as attachment:
        collected = Collected(len(attachment.layers))
        attachment.probes.append(collected)
        for i, sample in enumerate(samples):
            cache = attachment.new_cache(len(sample))
            ids = sample[None].to(model.get_input_embeddings().weight.device)
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            cache.conversation.close()
            if progress:
                progress("samples read", i + 1, len(samples))
    return collected.found


def fit_layers(
    layers: list[Sampled],
    groups: int,
    count: int,
    *,
    shared: bool,
    seed: int,
    turned: bool = True,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> dict[int, Codebook]:
    """A codebook of each layer's keys; turned: in a basis that the queries suggest. device: where to cluster them."""

    def each() -> Iterator[tuple[int, Codebook]]:
        for i, found in enumerate(layers):
            keys = found.keys
            basis = fit_basis(keys, found.moment, groups) if turned else None
            pieces = (keys if basis is None else basis.keys(keys)).flatten(0, 1)
            book = fit(pieces if device is None else pieces.to(device), groups, count, shared=shared, seed=seed)
            yield i, replace(book, centroids=book.centroids.cpu(), basis=basis)
            if progress:
                progress("layers clustered", i + 1, len(layers))

    return dict(each())
