"""What a plan recommends: a method and the share of the weights that stays on the GPU; else what would fit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from coattn.errors import ConfigError
from coattn.hf.quantised.config import quantisation
from coattn.tools.plan.estimate import Estimate, Machine, estimate, longest
from coattn.tools.plan.known import GIB, cards_by_memory
from coattn.tools.plan.shape import ITEM_BYTES, ModelShape, read_shape
from coattn.units import ceil_div

METHODS = ("full", "auto", "cpu", "offload")
"""Methods that are recommended."""
LEAST_TOKENS = 1024
"""Shorter contexts are no way out."""
FEWER = 0.9
"""Of a checkpoint's bytes, what it has at most in 4 bits if it was not packed before."""


class Advice(NamedTuple):
    """A method that fits, and the share of the layers' weights that it leaves on the GPU."""

    row: Estimate
    share: float


def shares(machine: Machine) -> list[float]:
    """Of the weights, the share that was asked for; of one card's also smaller ones, in steps of 5%."""
    smaller = [] if machine.card.count > 1 else [share / 20 for share in range(19, 1, -1)]
    return [machine.weights_on_gpu, *(share for share in smaller if share < machine.weights_on_gpu)]


def best(model: ModelShape, batch: int, tokens: int, machine: Machine) -> Advice | None:
    """`full` where all of it fits in GPU memory; else the fastest of what fits, each with as many of the weights on the
    GPU as its own bytes leave room for. None: nothing fits."""
    found = []
    for method in METHODS:
        rows = ((estimate(method, model, batch, tokens, at(machine, share)), share) for share in shares(machine))
        taken = next((Advice(row, share) for row, share in rows if row.fits), None)
        if taken is not None and method == "full" and taken.share == machine.weights_on_gpu:
            return taken
        found += [] if taken is None else [taken]
    return min(found, key=lambda advice: advice.row.step_s or 0, default=None)


def at(machine: Machine, share: float) -> Machine:
    """The machine with this share of the layers' weights on the GPU."""
    return replace(machine, weights_on_gpu=share)


def in_bits(name: str, config: Mapping[str, Any], weights: str) -> Mapping[str, Any]:
    """The config of a checkpoint in `int4` or `int8`. Raises ConfigError where the weights are in few bits already."""
    if quantisation(config):
        raise ConfigError(f"The weights of {name} are quantised already.", "Leave --weights out.")
    return {**config, "quantization_config": {"quant_method": "gptq", "bits": int(weights.removeprefix("int"))}}


def in_4_bits(model: ModelShape) -> ModelShape | None:
    """The same model in 4 bits; None: it is hardly smaller so."""
    plain = {key: value for key, value in model.config.items() if key != "quantization_config"}
    dtype = next(name for name, size in ITEM_BYTES.items() if size == model.item_bytes)
    packed = read_shape(model.name, in_bits(model.name, plain, "int4"), dtype)
    return packed if packed.weight_bytes < FEWER * model.weight_bytes else None


def what_would_fit(model: ModelShape, batch: int, tokens: int, machine: Machine) -> list[str]:
    """Options of `plan` under which something fits, each by itself."""
    ways, endless = [], replace(machine, dram=None)
    reach = max(longest(m, model, batch, at(machine, share), tokens) for m in METHODS for share in shares(machine))
    if reach >= LEAST_TOKENS:
        ways.append(f"--context {reach}")
    packed = in_4_bits(model)
    if packed and best(packed, batch, tokens, machine):
        ways.append("--weights int4")
    rows = [estimate(m, model, batch, tokens, at(endless, share)) for m in METHODS for share in shares(machine)]
    if any(row.fits for row in rows):
        ways.append(f"--dram {ceil_div(min(row.dram for row in rows if row.fits), GIB)}GiB")
    for key, card in cards_by_memory():
        if card.memory > machine.card.memory and best(model, batch, tokens, replace(machine, card=card)):
            return [*ways, f"--gpu {key} ({card.memory // GIB} GiB)"]
    return ways
