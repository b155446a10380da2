"""Codebooks from a text: a model reads some of it, and the keys of each layer are clustered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.errors import ConfigError, InputError
from coattn.hf.architectures import PreTrainedModel, describe_layers
from coattn.hf.converted import Progress, silent
from coattn.hf.load import Loaded
from coattn.kernels.quantise.basis import fit_basis
from coattn.kernels.quantise.codebook import Codebook, book_bytes, fit
from coattn.kernels.quantise.file import Origin, save
from coattn.step.probe import Collected, Sampled
from coattn.text import Text
from coattn.tools.calibrate.reading import read, tokens_of


def choose_samples(ids: Tensor, samples: int, length: int, seed: int) -> list[Tensor]:
    """Stretches of a text `[tokens]`, drawn at random without overlap as far as the text allows; all of a short one."""
    length = min(length, len(ids))
    room = len(ids) - samples * length
    if room <= 0:
        return list(torch.split(ids, length))[:samples]
    starts = torch.randint(0, room + 1, (samples,), generator=torch.Generator().manual_seed(seed)).sort().values
    return [ids[s + i * length : s + (i + 1) * length] for i, s in enumerate(starts.tolist())]


def collect(model: PreTrainedModel, samples: list[Tensor], progress: Progress = silent) -> list[Sampled]:
    """The keys of every layer. Cost: one prefill a sample."""
    collected = Collected(len(describe_layers(model)))
    read(model, samples, collected, progress)
    return collected.layers()


def fit_layers(
    layers: list[Sampled],
    groups: int,
    count: int,
    *,
    seed: int,
    turned: bool = True,
    progress: Progress = silent,
    device: torch.device | None = None,
) -> dict[int, Codebook]:
    """A codebook of each layer's keys; turned: in a basis that the queries suggest. device: where to cluster them."""
    books = {}
    for i, (keys, moment) in enumerate(layers):
        basis = fit_basis(keys, moment, groups) if turned else None
        pieces = (keys if basis is None else basis.keys(keys)).flatten(0, 1)
        book = fit(pieces.to(device), groups, count, seed=seed)
        books[i] = replace(book, centroids=book.centroids.cpu(), basis=basis)
        progress("layers clustered", i + 1, len(layers))
    return books


def write_codebook(
    loaded: Loaded,
    text: Text,
    target: Path,
    *,
    groups: int | None = None,
    centroids: int = 8192,
    turned: bool = True,
    samples: int = 3,
    length: int = 8192,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes codebooks for product-quantised keys -> what `coattn calibrate` says of them.

    groups: by default half the head size. turned: in a basis of their own.
    """
    shapes = describe_layers(loaded.model)
    head_dim = shapes[0].head_dim
    groups = groups or head_dim // 2
    if head_dim % groups:
        raise ConfigError(
            f"--groups is {groups}, which does not divide the head size {head_dim}.",
            f"Give {head_dim // 2} or {head_dim // 4}.",
        )
    chosen = choose_samples(tokens_of(loaded, text), samples, min(length, loaded.positions or length), seed)
    tokens = sum(map(len, chosen))
    if tokens * shapes[0].kv_heads * groups < centroids:
        raise InputError(f"{text.name} has too few tokens for {centroids:,} centroids.", "Give a longer text.")
    layers = collect(loaded.model, chosen, progress)
    device = loaded.model.get_input_embeddings().weight.device
    where = device if device.type == "cuda" else None  # all distances on a GPU are faster than a tree on the host
    books = fit_layers(layers, groups, centroids, seed=seed, turned=turned, progress=progress, device=where)
    source, marks = (loaded.name, text.name, text.sha256), tuple(shape.mark for shape in shapes)
    longest = max(map(len, chosen))
    origin = Origin(*source, groups, centroids, True, head_dim, marks, len(chosen), longest, seed)
    save(target, books, origin)
    return {
        "codebook": str(target),
        "model": loaded.name,
        "text": text.name,
        "groups": groups,
        "centroids": centroids,
        "tokens": tokens,
        "basis": turned,
        "relative_error": [error(book, layer.keys) for book, layer in zip(books.values(), layers, strict=True)],
        "bytes": sum(book_bytes(shape, groups, centroids, turned) for shape in shapes),
    }


def error(book: Codebook, keys: Tensor) -> float:
    """The share of the squared length of keys `[n, kv_heads, head_dim]` that their codes lose; over some of them."""
    some = keys[:: max(1, len(keys) // 1024)].float()
    lost = (book.decode(book.encode(some)) - some).square().sum()
    return float(lost / some.square().sum())
