"""Where an engine's layers and their KV lie: on one device, or on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coattn.cache import available
from coattn.cache.ledger import Dram, Ledger
from coattn.engine.plan.kv import layer_kv
from coattn.errors import ConfigError
from coattn.hf.architectures import PreTrainedModel, describe_layers
from coattn.hf.division import Sizes, choose_devices, choose_shares, divide, sizes
from coattn.hf.forward import Session
from coattn.hf.pipeline import PipelineStages
from coattn.hf.probe import mixers_of
from coattn.method.row import Composed
from coattn.units import parse_bytes

SHARE = 0.8
"""Of the free memory of a tier, what the KV may take when no budget is given; the rest is for activations."""

Size = int | float | str


@dataclass(frozen=True)
class Devices:
    """What was asked for, and, once it is resolved, the pipeline between the devices."""

    devices: tuple[torch.device, ...] = ()
    """None: where the model is."""
    shares: tuple[float, ...] = ()
    budgets: tuple[int | None, ...] = (None,)
    """Of KV in the GPU tier, one for each device."""
    pipeline: PipelineStages | None = None
    weights: Sizes | None = None

    @staticmethod
    def of(
        devices: Sequence[str | torch.device] | None,
        shares: Sequence[float] | None,
        gpu_kv: Size | Sequence[Size] | None,
        device: str | torch.device = "auto",
        weights_on_gpu: float | None = None,
    ) -> Devices:
        """Raises ConfigError for what does not go together."""
        if devices is None:
            if shares is not None:
                raise ConfigError("device_shares is given without devices.", "Give both, or neither.")
            return Devices(budgets=_budgets(gpu_kv, 1))
        for name, given in (("device", device != "auto"), ("weights_on_gpu", weights_on_gpu is not None)):
            if given:
                raise ConfigError(f"Both devices and {name} are given.", "Leave one out.")
        found = choose_devices(devices)
        return Devices(found, choose_shares(shares, len(found)), _budgets(gpu_kv, len(found)))

    @property
    def several(self) -> bool:
        return bool(self.devices)

    @property
    def first(self) -> torch.device | None:
        """Of several devices."""
        return torch.device(self.devices[0].type) if self.devices else None

    def resolve(self, model: PreTrainedModel, composed: Composed, seqs: int, tokens: int) -> Devices:
        """Divides a model's layers, and moves their weights. The caller closes `pipeline`."""
        if not self.devices:
            return self
        if getattr(model, "hf_device_map", None):
            raise ConfigError(
                "devices is given, but the model was loaded with a device_map, which says where weights lie.",
                "Leave one of them out.",
            )
        if mixers_of(model):
            raise ConfigError(
                "devices is given, but layers with a state instead of a KV cache are not divided between devices.",
                "Take one device, or weights_on_gpu where the weights do not fit.",
            )
        weights = sizes(model)
        division = divide(weights, layer_kv(describe_layers(model), composed, seqs, tokens), self.devices, self.shares)
        return replace(self, pipeline=PipelineStages(model, division), weights=weights)

    def ledger(self, session: Session, host: int | None) -> Ledger:
        """The budgets of the tiers: what was given, or most of what is free on a GPU and of the machine's memory.

        host: of DRAM, all devices.
        """
        dram = machine_dram(session.device)
        if self.pipeline is None:
            return Ledger(_free(session.device) if self.budgets[0] is None else self.budgets[0], host, dram)
        division, found = self.pipeline.division, Ledger(None, host, dram)
        # two stages on one device share what is free there
        gpu = [
            _free(device, division.devices.count(device)) if given is None else given
            for device, given in zip(division.devices, self.budgets, strict=True)
        ]
        stages = range(len(division.devices))
        kv = [sum(s.token_bytes for s in session.layers if s.stage == stage) for stage in stages]
        found.divide(division.names, gpu, kv)
        return found

    def report(self, ledger: Ledger) -> dict[str, Any]:
        """What lies on each device; nothing where there is but one."""
        if self.pipeline is None or self.weights is None:
            return {}
        division = self.pipeline.division
        rows = zip(division.names, division.spans(), self.weights.on_each(division), ledger.parts, strict=True)
        return {
            "devices": [
                {"device": name, "layers": list(span), "weight_bytes": own, "gpu_kv_limit": part.gpu, **part.describe()}
                for name, span, own, part in rows
            ]
        }


def machine_dram(device: torch.device) -> Dram:
    """What this machine, or its container, has for tiers without a budget. device: of the model."""
    total, free = available.memory()
    return Dram(total, int(SHARE * free), ("host",) if device.type == "cuda" else ("gpu", "host"))


def _budgets(given: Size | Sequence[Size] | None, devices: int) -> tuple[int | None, ...]:
    """Bytes for each device, by one size for each of them or one for all."""
    listed = given.split(",") if isinstance(given, str) and "," in given else given
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        if len(listed) != devices:
            where = "one device" if devices == 1 else f"{devices} devices"
            raise ConfigError(f"gpu_kv has {len(listed)} sizes for {where}.", "Give one for each, or one for all.")
        return tuple(parse_bytes(size, "gpu_kv") for size in listed)
    return (parse_bytes(listed, "gpu_kv"),) * devices


def _free(device: torch.device, users: int = 1) -> int | None:
    """A budget for the GPU tier when none is given: most of what is free on the device; None without a GPU."""
    return int(SHARE * torch.cuda.mem_get_info(device)[0]) // users if device.type == "cuda" else None
