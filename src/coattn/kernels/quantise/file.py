"""What `coattn calibrate` writes: tensors of every layer in a file, and what they were made of; codebooks are so."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from coattn.errors import ConfigError
from coattn.kernels.quantise.basis import Basis
from coattn.kernels.quantise.codebook import Codebook
from coattn.types import LayerShape

FORMAT = "coattn-codebook-1"
MAKE = "Make one with `coattn calibrate hcattention`."
TOLERANCE = 2e-3
"""By how much a layer's mark may differ: rounding weights to bfloat16 changes it less."""


@dataclass(frozen=True)
class Origin:
    """What a codebook file says of itself."""

    model: str
    text: str
    text_sha256: str
    groups: int
    centroids: int
    shared: bool
    """Whether all groups have one codebook, as they must."""
    head_dim: int
    marks: tuple[float | None, ...]
    """One number of each layer's own weights, by which another model is told apart."""
    samples: int = 0
    length: int = 0
    """Tokens of each sample."""
    seed: int = 0
    basis: bool = False
    """Whether keys are turned to a basis before they are cut."""


def write_file(path: Path, tensors: dict[str, Tensor], form: str, origin: Any) -> None:
    """origin: a dataclass, what the file says of itself."""
    # through a file of ours: safetensors makes its own readable for nobody else
    path.write_bytes(serialise(tensors, {"format": form, "origin": json.dumps(asdict(origin))}))


def read_file(path: str, form: str, name: str, kind: str, hint: str) -> dict[str, Any]:
    """What a file says of itself. Raises ConfigError where it is not one of this form: `name` in the words of people,
    `kind` of what it holds."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ConfigError(f"There is no {name} {path}.", hint) from None
    except (OSError, SafetensorError, TypeError):
        raise ConfigError(f"{path} cannot be read as a {kind}: it is damaged, or another kind of file.", hint) from None
    if metadata.get("format") != form:
        raise ConfigError(f"{path} is not a {kind} of this version.", hint)
    origin = json.loads(metadata["origin"])
    return {**origin, "marks": tuple(origin["marks"])}


def save(path: Path, books: Mapping[int, Codebook], origin: Origin) -> None:
    """Writes the books of layers `0 .. n - 1`; whether they have a basis is theirs to say."""
    origin = replace(origin, basis=any(book.basis is not None for book in books.values()))
    tensors = {f"layer.{i}": book.centroids.float().contiguous() for i, book in books.items()}
    for i, book in books.items():
        if book.basis is not None:
            tensors[f"basis.{i}"] = book.basis.to.float().contiguous()
    write_file(path, tensors, FORMAT, origin)


def read_origin(path: str) -> Origin:
    """What a file says of itself. Raises ConfigError where it is not a codebook."""
    origin = Origin(**read_file(path, FORMAT, "codebook", "codebook", MAKE))
    if not origin.shared:
        raise ConfigError(f"{path} has a codebook for each group, and only one for all is taken.", MAKE)
    return origin


def load(path: str, layers: Mapping[int, LayerShape]) -> dict[int, Codebook]:
    """The books of these layers, each on its device and in its dtype. Raises ConfigError for another model's."""
    origin = read_origin(path)
    for i, shape in layers.items():
        if i >= len(origin.marks) or shape.head_dim != origin.head_dim or not same_mark(shape.mark, origin.marks[i]):
            raise ConfigError(
                f"The codebook {path} was made for {origin.model} ({len(origin.marks)} layers, head size "
                f"{origin.head_dim}), not for the model in use.",
                "Make one for this model with `coattn calibrate hcattention`.",
            )
    with safe_open(path, "pt") as file:
        books = {}
        for i, shape in layers.items():
            basis = None
            if origin.basis:
                basis = Basis.of(file.get_tensor(f"basis.{i}"), shape.dtype, shape.device)
            centroids = file.get_tensor(f"layer.{i}").to(shape.device, shape.dtype)
            books[i] = Codebook(centroids, origin.groups, basis=basis)
        return books


def same_mark(one: float | None, other: float | None) -> bool:
    """Whether two marks can be of the same layer; one that is not known can."""
    if one is None or other is None:
        return True
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
