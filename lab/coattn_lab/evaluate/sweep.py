"""Many rows on the same windows: full attention once, then each row beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.method.row import Composed, compose
from coattn.method.table import METHODS, find_method
from coattn.tools.evaluate import fidelity, perplexity
from coattn.tools.evaluate.forced import Forced, Progress, force

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Row:
    """A method with its parameters, and how the user wrote it. size: what is known of its GPU memory."""

    name: str
    composed: Composed
    size: Mapping[str, Any] = field(default_factory=dict)


def expand(spec: str, parse: Any) -> list[Row]:
    """`hgca,window_blocks=32|128,beta=1` -> a row for each combination. parse: settings to parameters."""
    method, *settings = spec.split(",")
    choices = []
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} in {spec!r} is not NAME=VALUE.", "Write rows like hgca,beta=0.5|1.")
        choices.append([f"{name}={value}" for value in values.split("|")])
    return [
        Row(",".join((method, *chosen)), compose(find_method(method), **parse(chosen)))
        for chosen in itertools.product(*choices)
    ]


def read(
    model: PreTrainedModel, windows: Tensor, prefill: int, composed: Composed, progress: Progress | None
) -> Forced:
    """Windows `[windows, tokens]` under a row, through the engine's steps."""
    return force(model, windows, prefill, composed.method, progress=progress, score_prefill=False, **composed.params)


def full() -> Composed:
    """What every row is compared with."""
    return compose(METHODS["full"])


def compare(own: Forced, reference: Forced) -> dict[str, Any]:
    """Perplexity over the decode steps and its ratio to full attention's, KL, agreement, a step's time, entries
    attended, bytes.

    Intervals are of 95%, from the spread of single tokens, which are taken for independent of each other.
    """
    losses, exact = own.losses.flatten(), reference.losses.flatten()
    kl = torch.cat([fidelity.kl_divergence(a, b) for a, b in zip(reference.logits, own.logits, strict=True)])
    top1 = (own.logits.argmax(-1) == reference.logits.argmax(-1)).double().mean()
    difference = losses - exact
    return {
        "perplexity": perplexity.perplexity(losses),
        "perplexity_full": perplexity.perplexity(exact),
        "ratio": math.exp(difference.mean().item()),
        "ratio_95": perplexity.interval(difference),
        "tokens": len(losses),
        "kl": kl.mean().item(),
        "kl_95": fidelity.interval(kl),
        "top1": top1.item(),
        "step_ms": own.step_ms,
        "step_ms_full": reference.step_ms,
        **own.report,
    }
