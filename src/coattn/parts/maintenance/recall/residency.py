"""Which blocks are resident: a table in GPU memory, read and changed by tensor operations alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.cache.spec import CacheSpec
from coattn.errors import ConfigError
from coattn.kernels.quantise.file import same_mark
from coattn.types import LayerShape

NONE = -1
"""In the table: no block."""


class Found(NamedTuple):
    """Picked blocks by whether they are resident, `[seqs, kv_heads, k]` each."""

    resident: Tensor
    missing: Tensor
    ids: Tensor
    """Where in GPU memory the resident ones are."""


class Residency:
    """By layer `[slots + 1, kv_heads, places]` int32: the number of the block at each place of each pool.

    The last row is for padding rows and stays empty. Owner: the maintenance. Writers: `replace`, `forget`; `renew` in
    decode steps. Reader: `pick_blocks`, in the steps that follow. A layer's row is read before it is written within a
    step, so a change is seen one step later.
    """

    def __init__(self, spec: CacheSpec, places: int, first: int) -> None:
        """first: the block of GPU memory at which the pools begin."""
        self.places, self.first, self.nobody = places, first, spec.seqs
        self.held = {
            i: torch.full((spec.seqs + 1, s.kv_heads, places), NONE, dtype=torch.int32, device=s.device)
            for i, s in spec.layers.items()
        }

    def find(self, layer: int, chosen: Tensor, counts: Tensor, slots: Tensor) -> Found:
        """chosen `[seqs, kv_heads, k]` block numbers, of which `counts` `[seqs, kv_heads]` count; slots `[seqs]`."""
        held = self.held[layer][slots]
        match = chosen[..., :, None] == held[..., None, :]
        real = torch.arange(chosen.shape[-1], device=chosen.device) < counts[..., None]
        resident = match.any(-1) & real
        return Found(resident, real & ~resident, self._ids(slots, match.int().argmax(-1)))

    def replace(
        self, layer: int, scores: Tensor, chosen: Tensor, counts: Tensor, slots: Tensor, due: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gives the missed ones of `chosen` the places of residents with lower scores, the lowest first.

        scores: `[seqs, kv_heads, n]` of all blocks; due: `[seqs]`, for which sequences. Returns where in GPU memory
        blocks have to go and their numbers, `[seqs, kv_heads, m]` each; negative: nothing.
        """
        held = self.held[layer][slots]
        missing = self.find(layer, chosen, counts, slots).missing & due[:, None, None]
        wanted = scores.gather(-1, chosen).masked_fill(~missing, -torch.inf)
        best = wanted.topk(min(chosen.shape[-1], self.places), -1)
        numbers = chosen.gather(-1, best.indices)
        kept = (chosen[..., :, None] == held[..., None, :]).any(-2)
        present = (held >= 0) & (held < scores.shape[-1])
        worth = scores.gather(-1, held.long().clamp(0, scores.shape[-1] - 1))
        # an empty place is worth less than the least of blocks, and what this step attended to is kept
        worth = worth.masked_fill(~present, -torch.inf).masked_fill(kept, torch.inf)
        order = worth.argsort(dim=-1, stable=True)[..., : numbers.shape[-1]]
        take = best.values > worth.gather(-1, order)
        now = held.scatter(-1, order, numbers.int().where(take, held.gather(-1, order)))
        self.held[layer][slots] = now
        return self._ids(slots, order).where(take, NONE), numbers

    def hold(self, layer: int, numbers: Tensor) -> None:
        """The first slots hold blocks `[slots, kv_heads, at most places]` from now on; nothing is copied."""
        self.held[layer][: len(numbers), :, : numbers.shape[-1]] = numbers.int()

    def forget(self, slot: int, keep: int) -> None:
        """Drops what a sequence has resident of its blocks from number `keep` on."""
        for layer in self.held:
            self.forget_layer(layer, slot, keep)

    def forget_layer(self, layer: int, slot: int, keep: int) -> None:
        """The same in one layer."""
        held = self.held[layer][slot]
        held.masked_fill_(held >= keep, NONE)

    def _ids(self, slots: Tensor, places: Tensor) -> Tensor:
        """Blocks of GPU memory of places `[seqs, kv_heads, n]` of pools."""
        ids = self.first + slots[:, None, None] * self.places + places
        return ids.where(slots[:, None, None] != self.nobody, 0).to(torch.int32)


MOST = 1 << 31
"""No layer has so many tokens, and no run so many steps."""


def read_intervals(path: str) -> list[int]:
    """The recall interval of each layer, from a file that `coattn profile scout` wrote."""
    return _read_layers(path, "recall_file", "recall_intervals", 0, "Write one: coattn profile scout --out FILE.")


def check_profile(path: str, count: int, layers: Mapping[int, LayerShape]) -> None:
    """Raises ConfigError where the file that gave `count` intervals is of another model; one by hand has no marks."""
    hint = "Profile this model: coattn profile scout."
    if max(layers) >= count:
        raise ConfigError(f"{path} has intervals for {count} layers, but the model has more.", hint)
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    marks = found.get("marks")
    if marks is None:
        return
    known = isinstance(marks, list) and all(mark is None or type(mark) is float for mark in marks)
    if not known or len(marks) != count or not all(same_mark(s.mark, marks[i]) for i, s in layers.items()):
        raise ConfigError(f"{path} was made for {found.get('model')}, not for the model in use.", hint)


def _read_layers(path: str, name: str, key: str, least: int, hint: str) -> list[int]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))[key]
        if not isinstance(found, list) or not all(type(n) is int and least <= n < MOST for n in found):
            raise ValueError(f"{key} is not a list of whole numbers")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}, which {name} names.", hint) from None
    except OSError as error:
        raise ConfigError(f"{name} {path!r} cannot be read: {error.strerror}.", hint) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{name} {path!r} is not a JSON file with a list {key!r} of whole numbers.", hint) from None
    return found
