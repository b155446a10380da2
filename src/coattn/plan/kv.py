"""What a method would hold where: bytes per tier for a model's shapes and a context, without taking any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method import Composed, compose
from coattn.methods import METHODS
from coattn.runtime import Runtime
from coattn.types import LayerShape, Step, Tier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_BLOCKS = 1 << 23
"""A cache lists every block: seconds at this number."""


def held(layers: Sequence[LayerShape], composed: Composed, batch: int, context: int) -> dict[Tier, int]:
    """Bytes that the cache holds once `batch` prompts of `context` tokens are in it; its own ledger says so.

    On a device without memory. What a GPU needs beside it to bring blocks in from DRAM is not counted.
    """
    ghosts = [replace(shape, device=torch.device("meta"), mark=None) for shape in layers]
    ledger = Ledger()
    runtime = Runtime(ghosts, composed, ledger, batch, context)
    slots = tuple(range(batch))
    runtime.begin(Step.of(slots, (0,) * batch, (context,) * batch))
    found = dict(ledger.held)
    runtime.abort()
    runtime.release()
    return found


def layer_kv(layers: Sequence[LayerShape], composed: Composed, batch: int, context: int) -> list[int]:
    """Of the bytes that `held` finds in the GPU tier, about those of each layer.

    By the entries that each may have at most: a layer with a sliding window of its own has fewer.
    """
    blocks = batch * -(-context // composed.params["block"])
    seqs = batch if blocks <= MOST_BLOCKS else 1
    own = [shape.token_bytes * min(context, shape.sliding_window or context) for shape in layers]
    total = held(layers, composed, seqs, context)["gpu"] * batch // seqs
    return [total * each // sum(own) for each in own]


def plan(
    model: PreTrainedModel,
    composed: Composed,
    batch: int,
    context: int,
    gpu: int | None,
    host: int | None,
    weights_on_gpu: float = 1.0,
) -> dict[str, Any]:
    """Bytes per tier beside those of full attention, and whether they fit beside the weights.

    model: may be on a device without memory. gpu, host: all of a machine's memory. weights_on_gpu: share of the layers'
    weights that GPU memory holds at a time.
    """
    from coattn.hf.architectures import describe_layers
    from coattn.hf.weights import split

    blocks = batch * -(-context // composed.params["block"])
    if blocks > MOST_BLOCKS:
        raise ConfigError(
            f"{batch:,} x {context:,} tokens are {blocks:,} blocks, but a plan can be of {MOST_BLOCKS:,} at most.",
            "Plan fewer sequences or a shorter context: the bytes grow in proportion.",
        )
    layers = describe_layers(model)
    own = held(layers, composed, batch, context)
    full = held(layers, compose(METHODS["full"]), batch, context)["gpu"]
    lie = split(model, weights_on_gpu)
    weights, there = lie.gpu_bytes, own["host"] + lie.host_bytes
    return {
        **composed.describe(),
        "batch": batch,
        "context": context,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "gpu_weight_bytes": weights,
        "host_weight_bytes": lie.host_bytes,
        "step_weight_bytes": lie.step_bytes,
        "gpu_kv_bytes": own["gpu"],
        "host_kv_bytes": own["host"],
        "full_kv_bytes": full,
        "gpu_share": own["gpu"] / full,
        "gpu_bytes": weights + own["gpu"],
        "fits_gpu": None if gpu is None else weights + own["gpu"] <= gpu,
        "fits_host": None if host is None else there <= host,
    }
