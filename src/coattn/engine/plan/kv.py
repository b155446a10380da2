"""What a method would hold where: bytes per tier for a model's shapes and a context, without taking any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method.row import Composed, compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step, Tier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coattn.hf.division import Division

MOST_BLOCKS = 1 << 23
"""A cache lists every block: seconds at this number."""


def held(layers: Sequence[LayerShape], composed: Composed, batch: int, context: int) -> dict[Tier, int]:
    """Bytes that the cache holds once `batch` prompts of `context` tokens are in it; its own ledger says so.

    On a device without memory. What a GPU needs beside it to bring blocks in from DRAM is not counted.
    """
    return _held(layers, composed, batch, context, Ledger())[0][0]


def _held(
    layers: Sequence[LayerShape], composed: Composed, batch: int, context: int, ledger: Ledger
) -> tuple[list[dict[Tier, int]], int]:
    """Of the ledger, then of its parts; and bytes that the row may want in DRAM beside them."""
    ghosts = [replace(shape, device=torch.device("meta"), mark=None) for shape in layers]
    runtime = Runtime(ghosts, composed, ledger, batch, context)
    slots = tuple(range(batch))
    running = runtime.begin(Step.of(slots, (0,) * batch, (context,) * batch))
    found = [dict(each.held) for each in (ledger, *ledger.parts)]
    extra = max(group.cache.spec.plan.host_overhead for group in runtime.groups)
    runtime.abort(running)
    runtime.release()
    return found, int(found[0]["host"] * extra)


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
    division: Division | None = None,
) -> dict[str, Any]:
    """Bytes per tier beside those of full attention, and whether they fit beside the weights.

    model: may be on a device without memory. gpu, host: all of a machine's memory, gpu of each device. weights_on_gpu:
    share of the layers' weights that GPU memory holds at a time. division: of the layers between several devices.
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
    (own,), copies = _held(layers, composed, batch, context, Ledger())
    full = held(layers, compose(METHODS["full"]), batch, context)["gpu"]
    lie = split(model, weights_on_gpu)
    weights, there = lie.gpu_bytes, own["host"] + lie.host_bytes
    devices = [] if division is None else each_device(model, layers, composed, batch, context, division, gpu)
    fits = None if gpu is None else weights + own["gpu"] <= gpu
    return {
        **composed.describe(),
        "batch": batch,
        "context": context,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "gpu_weight_bytes": weights,
        "host_weight_bytes": lie.host_bytes,
        "step_weight_bytes": lie.host_bytes,
        "gpu_kv_bytes": own["gpu"],
        "host_kv_bytes": own["host"],
        "full_kv_bytes": full,
        "gpu_share": own["gpu"] / full,
        "gpu_bytes": weights + own["gpu"],
        "fits_gpu": all(row["fits"] for row in devices) if devices and gpu is not None else fits,
        "fits_host": None if host is None else there <= host,
        "host_copies_bytes": copies,
        "fits_copies": None if host is None else there + copies <= host,
        **({"devices": devices} if devices else {}),
    }


def each_device(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    composed: Composed,
    batch: int,
    context: int,
    division: Division,
    gpu: int | None,
) -> list[dict[str, Any]]:
    """What each device holds, and whether it fits in `gpu` bytes."""
    from coattn.hf.division import sizes

    weights = sizes(model).on_each(division)
    pairs = zip(layers, division.stages, strict=True)
    shapes = [replace(shape, stage=stage) for shape, stage in pairs]
    ledger, names = Ledger(), division.names
    ledger.divide(names, [None] * len(names), [1] * len(names))
    kv = _held(shapes, composed, batch, context, ledger)[0][1:]
    return [
        {
            "device": name,
            "layers": list(span),
            "weight_bytes": own,
            "gpu_kv_bytes": held["gpu"],
            "host_kv_bytes": held["host"],
            "gpu_bytes": own + held["gpu"],
            "fits": None if gpu is None else own + held["gpu"] <= gpu,
        }
        for name, span, own, held in zip(names, division.spans(), weights, kv, strict=True)
    ]
