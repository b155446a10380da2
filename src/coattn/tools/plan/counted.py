"""The bytes of any row with any settings, counted by the cache's own ledger on a device without memory."""

from collections.abc import Mapping
from typing import Any

import torch

from coattn.engine.plan.kv import MOST_BLOCKS, held
from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.tools.plan.estimate import Estimate, Machine, estimate
from coattn.tools.plan.shape import ModelShape
from coattn.types import LayerShape
from coattn.units import ceil_div


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
    tiers = found["gpu"], found["host"]
    return estimate(composed.method.name, model, batch, tokens, machine, tiers, composed.exact)
