"""The files that rows read, from a loaded model and a text: codebooks, labels of heads, skews."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from coattn.baselines.duo.head_labels import HeadLabels, retrieval_heads
from coattn.errors import ConfigError, InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.generate import positions
from coattn.hf.load import Loaded
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.file import Origin
from coattn.kernels.quantise.file import save as save_books
from coattn.kernels.quantise.skew import SkewOrigin
from coattn.kernels.quantise.skew import save as save_skews
from coattn.text import Text
from coattn.tools.calibrate.codebooks import Progress, Sampled, choose_samples, collect, fit_layers
from coattn.tools.calibrate.heads import make_prompt, score_heads
from coattn.tools.calibrate.skews import read_skews

CENTROIDS, LENGTH, SAMPLES = 8192, 8192, 3


@dataclass(frozen=True)
class Books:
    """Codebooks as they were made, and the keys they were made of."""

    books: dict[int, Codebook]
    layers: list[Sampled]
    groups: int
    tokens: int


def _ids(loaded: Loaded, text: Text) -> Tensor:
    ids: Tensor = loaded.tokenizer(text.body, return_tensors="pt", verbose=False).input_ids[0]
    return ids


def write_codebook(
    loaded: Loaded,
    text: Text,
    target: Path,
    *,
    groups: int | None = None,
    centroids: int = CENTROIDS,
    shared: bool = True,
    turned: bool = True,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    progress: Progress | None = None,
) -> Books:
    """Codebooks for product-quantised keys. groups: by default half the head size; turned: in a basis of their own."""
    shapes = describe_layers(loaded.model)
    head_dim = shapes[0].head_dim
    groups = groups or head_dim // 2
    if head_dim % groups:
        raise ConfigError(
            f"--groups is {groups}, which does not divide the head size {head_dim}.",
            f"Give {head_dim // 2} or {head_dim // 4}.",
        )
    chosen = choose_samples(_ids(loaded, text), samples, min(length, positions(loaded) or length), seed)
    if sum(map(len, chosen)) * shapes[0].kv_heads * groups < centroids:
        raise InputError(f"{text.name} has too few tokens for {centroids:,} centroids.", "Give a longer text.")
    layers = collect(loaded.model, chosen, progress)
    device = loaded.model.get_input_embeddings().weight.device
    where = device if device.type == "cuda" else None  # all distances on a GPU are faster than a tree on the host
    books = fit_layers(
        layers, groups, centroids, shared=shared, seed=seed, turned=turned, progress=progress, device=where
    )
    origin = Origin(
        loaded.name,
        text.name,
        text.sha256,
        groups,
        centroids,
        shared,
        head_dim,
        tuple(shape.mark for shape in shapes),
        len(chosen),
        max(map(len, chosen)),
        seed,
    )
    save_books(target, books, origin)
    return Books(books, layers, groups, sum(map(len, chosen)))


def write_heads(
    loaded: Loaded,
    text: Text,
    target: Path,
    *,
    rho: float | None = None,
    lengths: Sequence[int] = (2048, 4096),
    samples: int = 4,
    sinks: int = 64,
    recent: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> HeadLabels:
    """Retrieval heads by needle mass. rho: their share; by default 0.5, and 0.25 without grouped heads."""
    shapes, most = describe_layers(loaded.model), positions(loaded)
    sizes = sorted({length if most is None else min(length, most) for length in lengths})
    rho = (0.5 if shapes[0].kv_heads < shapes[0].q_heads else 0.25) if rho is None else rho
    draws, ids = random.Random(seed), _ids(loaded, text).tolist()
    made = [make_prompt(loaded.tokenizer, ids, n, draws) for n in sizes for _ in range(samples)]
    scores = score_heads(loaded.model, made, sinks, recent, progress)
    labels = HeadLabels(
        loaded.name, [shape.mark for shape in shapes], sinks, recent, rho, scores, retrieval_heads(scores, rho),
        prompts=len(made), text=text.name,
    )  # fmt: skip
    labels.save(target)
    return labels


@dataclass(frozen=True)
class Skews:
    """tokens: of the text that were read. kept: by layer, what a fifth of the columns holds of the queries."""

    tokens: int
    kept: list[float]


def write_skew(loaded: Loaded, text: Text, target: Path, *, length: int) -> Skews:
    """A rotation for each KV head, after which a few columns of a key tell most."""
    ids = _ids(loaded, text)[: min(length, positions(loaded) or length)]
    if not len(ids):
        raise InputError(f"{text.name} has no tokens.", "Give a longer text.")
    found = read_skews(loaded.model, ids)
    marks = tuple(shape.mark for shape in describe_layers(loaded.model))
    origin = SkewOrigin(loaded.name, text.name, text.sha256, len(ids), marks)
    save_skews(target, dict(enumerate(each for each, _ in found)), origin)
    return Skews(len(ids), [share for _, share in found])
