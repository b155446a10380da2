"""What a method would hold where: bytes per tier for a model's shapes and a context, without taking any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from coattn.cache.ledger import Ledger
from coattn.method.row import Composed
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step, Tier

MOST_BLOCKS = 1 << 23
"""A cache lists every block: seconds at this number."""


def held(layers: Sequence[LayerShape], composed: Composed, batch: int, context: int) -> dict[Tier, int]:
    """Bytes that the cache holds once `batch` prompts of `context` tokens are in it; its own ledger says so.

    On a device without memory. What a GPU needs beside it to bring blocks in from DRAM is not counted.
    """
    ghosts = [replace(shape, device=torch.device("meta"), mark=None) for shape in layers]
    ledger = Ledger()
    runtime = Runtime(ghosts, composed, ledger, batch, context)
    running = runtime.begin(Step.of(tuple(range(batch)), (0,) * batch, (context,) * batch))
    found = dict(ledger.held)
    runtime.abort(running)
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
