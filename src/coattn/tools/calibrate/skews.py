"""InfiniGen's skew of every layer, from one forward pass over a text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.errors import InputError
from coattn.hf.architectures import PreTrainedModel, describe_layers
from coattn.hf.converted import Progress, silent
from coattn.hf.load import Loaded
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.skew import SKEWS, Skew, skew_of
from coattn.step.probe import Probe
from coattn.text import Text
from coattn.tools.calibrate.reading import read, tokens_of
from coattn.types import Step

SHARE = 0.2
"""Of the columns, for which the share of the queries' length is told."""


class Skewing(Probe):
    """The skew of each layer's queries, and the share of their squared length in the best columns."""

    def __init__(self) -> None:
        self.skews: dict[int, tuple[Skew, float]] = {}

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        made = skew_of(q, k.shape[1])
        columns = made.columns(max(1, int(SHARE * q.shape[-1])))
        grouped = q.float().view(len(q), k.shape[1], -1, q.shape[-1])
        inside = torch.einsum("thgd,hdc->thgc", grouped, columns).square().sum()
        self.skews[layer] = Skew(made.matrix.cpu(), made.order.cpu()), float(inside / grouped.square().sum())


def read_skews(model: PreTrainedModel, ids: Tensor, progress: Progress = silent) -> list[tuple[Skew, float]]:
    """By layer: the skew that a text `[tokens]` gives, and how much a fifth of the columns holds. Cost: one prefill."""
    probe = Skewing()
    read(model, [ids], probe, progress)
    return [probe.skews[layer] for layer in range(len(probe.skews))]


def write_skew(loaded: Loaded, text: Text, target: Path, *, length: int, progress: Progress = silent) -> dict[str, Any]:
    """Writes a rotation for each KV head, after which a few columns of a key tell most -> what `coattn calibrate` says.

    kept: by layer, what a fifth of the columns holds of the queries.
    """
    ids = tokens_of(loaded, text)[: min(length, loaded.positions or length)]
    if not len(ids):
        raise InputError(f"{text.name} has no tokens.", "Give a longer text.")
    skews = read_skews(loaded.model, ids, progress)
    marks = tuple(shape.mark for shape in describe_layers(loaded.model))
    origin = TextOrigin(loaded.name, text.name, text.sha256, len(ids), marks)
    SKEWS.save(target, {layer: skew for layer, (skew, _) in enumerate(skews)}, origin)
    kept = [share for _, share in skews]
    return {"skew": str(target), "model": loaded.name, "text": text.name, "tokens": len(ids), "kept": kept}
