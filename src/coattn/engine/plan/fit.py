"""How long sequences may be, and how many run at a time, where nobody says so: what memory has room for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from coattn.cache.ledger import Ledger
from coattn.cache.states import ghosts as states_nowhere
from coattn.engine.admission import LEAST_TOKENS, Admission
from coattn.engine.method_choice import kv_bytes
from coattn.errors import BudgetError
from coattn.method.row import Composed
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, StateShape
from coattn.units import format_enough

log = logging.getLogger("coattn")

SLOTS = (16, 8, 4, 2, 1)
"""Sequences at a time: the first of these beside which one of full length fits. They share what each does not take."""
MOST_GPU = 1 << 45
"""Bytes that no GPU has."""
DRAM_TOKENS, DRAM_SHARE = 131072, 2
"""A GPU's DRAM is taken at once, which takes time: of twice so many tokens, or twice one sequence."""


def longest(
    layers: Sequence[LayerShape],
    composed: Composed,
    ledger: Ledger,
    batch: int,
    tokens: int,
    states: Sequence[StateShape] = (),
) -> int:
    """Tokens of the longest sequence that fits by itself, at most `tokens`, in an engine of `batch` such sequences.

    On a device without memory: takes nothing of the ledger. 0: not even the engine can be opened.
    """
    ghosts = [replace(shape, device=torch.device("meta"), mark=None) for shape in layers]
    padding, of_states = layers[0].device.type == "cuda", states_nowhere(states)
    try:
        runtime = Runtime(
            ghosts, composed, ledger.blank(), batch, tokens, fixed=True, padding=padding, states=of_states
        )
    except BudgetError:
        return 0
    most = Admission(runtime, tokens).most()
    runtime.release()
    return most


def say_enough(
    error: BudgetError,
    layers: Sequence[LayerShape],
    composed: Composed,
    ledger: Ledger,
    batch: int,
    tokens: int,
    states: Sequence[StateShape] = (),
) -> BudgetError:
    """The error of an engine that cannot be opened, with the `gpu_kv` under which a sequence of so many tokens fits."""
    staged = 2 * composed.params["block"] * max(shape.token_bytes for shape in layers)  # the least of a GPU's staging
    unit = staged if layers[0].device.type == "cuda" else 0
    low = high = ledger.gpu or 0
    if not low or ledger.parts or longest(layers, composed, Ledger(MOST_GPU, ledger.host), batch, tokens) < tokens:
        return error
    while longest(layers, composed, Ledger(high, ledger.host), batch, tokens, states) < tokens:
        low, high = high, 2 * high
    while high - low > high // 64:
        middle = (low + high) // 2
        fits = longest(layers, composed, Ledger(middle, ledger.host), batch, tokens, states) >= tokens
        low, high = (low, middle) if fits else (middle, high)
    enough = f"Raise gpu_kv to {format_enough(high + unit)}, which holds {tokens:,} tokens"
    return BudgetError(error.sentence, f"{enough}; or set max_length to less, or use a method that keeps less there.")


def choose(
    layers: Sequence[LayerShape],
    composed: Composed,
    ledger: Ledger,
    batch: int | None,
    tokens: int | None,
    most: int,
    states: Sequence[StateShape] = (),
) -> tuple[int, int]:
    """Sequences at a time and tokens of each; what is given stays, what is chosen is logged in a line.

    most: tokens that a sequence may have at most. Where not even short ones fit, opening the engine says so.
    """
    if batch is not None and tokens is not None:
        return batch, tokens
    slots, length = _choose(layers, composed, ledger, batch, tokens or most, tokens is not None, states)
    short, why = length < (tokens or most), "" if tokens else ", as many as the model has positions"
    if short:
        why = f", since memory has no room for the model's {most:,} positions"
    said = f"Sequences have at most {length:,} tokens{why}; {slots} run at a time."
    log.log(logging.WARNING if short else logging.INFO, said)
    return slots, length


def _choose(
    layers: Sequence[LayerShape],
    composed: Composed,
    ledger: Ledger,
    batch: int | None,
    wanted: int,
    fixed: bool,
    states: Sequence[StateShape],
) -> tuple[int, int]:
    """fixed: no shorter ones."""
    some = (batch,) if batch else SLOTS
    if batch is None and ledger.dram is not None and "gpu" not in ledger.dram.tiers:
        own = DRAM_SHARE * kv_bytes(layers, 1, max(wanted, DRAM_TOKENS))
        ledger.dram = replace(ledger.dram, free=min(ledger.dram.free, int(own)))
    for slots in some:
        if longest(layers, composed, ledger, slots, wanted, states) >= wanted:
            return slots, wanted
    if fixed:
        return some[-1], wanted
    low, high = min(wanted, LEAST_TOKENS), wanted
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        fits = longest(layers, composed, ledger, some[-1], middle, states) >= middle
        low, high = (middle, high) if fits else (low, middle)
    return next(
        (slots for slots in some if longest(layers, composed, ledger, slots, low, states) >= low), some[-1]
    ), low
