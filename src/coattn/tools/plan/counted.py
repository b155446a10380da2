"""The bytes of any row with any settings, counted by the cache's own ledger on a device without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from coattn.engine.plan.kv import held
from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.tools.plan.estimate import Estimate, Machine, estimate
from coattn.tools.plan.shape import ModelShape
from coattn.types import LayerShape
from coattn.units import ceil_div

MOST_BLOCKS = 1 << 23
"""A cache lists every block: seconds at this number."""


def count(
    method: str, settings: Mapping[str, Any], model: ModelShape, batch: int, tokens: int, machine: Machine
) -> Estimate:
    """A row with its settings. Where they are not the row's own, no time is forecast."""
    composed = compose(find_method(method), **settings)
    blocks = batch * ceil_div(tokens, composed.params["block"])
    if blocks > MOST_BLOCKS:
        raise ConfigError(
            f"{batch:,} x {tokens:,} tokens are {blocks:,} blocks, but a plan can be of {MOST_BLOCKS:,} at most.",
            "Plan fewer sequences or a shorter context: the bytes grow in proportion.",
        )
    dtype = {4: torch.float32, 2: torch.bfloat16}[model.item_bytes]
    nowhere = torch.device("meta")
    layers = [LayerShape(model.q_heads, model.kv_heads, model.head_dim, dtype, nowhere, w) for w in model.windows]
    found = held(layers, composed, batch, tokens)
    base = estimate("cpu", model, batch, tokens, machine)
    moved = model.weight_bytes - base.weights
    row = replace(
        base,
        method=composed.method.name,
        kv=found["gpu"],
        dram=found["host"] + moved,
        exact=composed.exact,
        step_s=None,
        first_token_s=None,
    )
    return replace(
        row,
        fits_gpu=row.gpu <= machine.card.memory,
        fits_dram=machine.dram is None or row.dram <= machine.dram,
    )
