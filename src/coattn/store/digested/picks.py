"""The picks of a recorded step: lists at fixed addresses, filled and renewed by kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coattn.ops.lists import Lists, Rows
from coattn.store.frame import Recording
from coattn.store.host_memory import host_memory
from coattn.types import LayerShape


class Picks:
    """One store's lists, for at most `batch` sequences.

    A layer has two: of its own query, and of the one that was foreseen. What the CPU reads of them lies in mapped host
    memory, and is not written again before the step is over.
    """

    def __init__(
        self, layers: dict[int, LayerShape], batch: int, ring: int, places: Callable[[int], int], once: bool
    ) -> None:
        """once: what a foreseen query picked stands, and the layer's own picks nothing."""
        self.layers, self.batch, self.ring, self.places, self.once = layers, batch, ring, places, once
        device = next(iter(layers.values())).device
        self.moved = torch.zeros(1, dtype=torch.int64, device=device)
        """Blocks that were brought from the arena, since the beginning."""
        self.mapped: dict[tuple[int, bool], Lists] = {}
        """By layer, and whether it was foreseen: lists whose far part the CPU reads."""
        self.foreseen: set[int] = set()
        self._own: dict[int, Lists] = {}
        """By layer: lists whose far part stays on the GPU, since the CPU was asked before."""
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._forked = False

    def lists(self, layer: int, ahead: bool, foreseen: bool, count: int) -> Lists:
        """Where a pick of `count` blocks goes. foreseen: the CPU has been started on the layer already."""
        if foreseen and not ahead:
            self.foreseen.add(layer)
            if self.once:
                return self.mapped[layer, True]
            if layer not in self._own:
                self._own[layer] = self._make(layer, count, False)
            return self._own[layer]
        key = (layer, ahead)
        if key not in self.mapped:
            self.mapped[key] = self._make(layer, count, True)
        return self.mapped[key]

    def of(self, layer: int, foreseen: bool) -> Lists | None:
        """What a layer picked for itself; None: nothing was picked."""
        if self.once:
            return self.mapped.get((layer, foreseen))
        return self._own.get(layer) if foreseen else self.mapped.get((layer, False))

    def nothing(self, layer: int) -> Lists:
        """Lists for a layer that picks nothing."""
        return self._make(layer, 1, False)

    def beside(self, run: Callable[[], None]) -> None:
        """Runs kernels beside what follows on the current stream, after what is there."""
        if self._side is None:
            run()
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            run()
        self._forked = True

    def rejoin(self) -> bool:
        """The current stream waits for all that runs beside it. Whether anything does."""
        forked, self._forked = self._forked, False
        if forked:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        return forked

    def attended(self, seqs: int) -> tuple[float, float] | None:
        """Entries attended near and far by the first rows of the last step, the mean over heads and layers that pick.

        Waits for the GPU.
        """
        own = self._by_layer()
        if not own:
            return None
        near = far = 0.0
        for layer, lists in own.items():
            asked = self.mapped[layer, True] if layer in self.foreseen else lists
            near += lists.near_tokens[:seqs].float().mean(1).sum().item()
            far += asked.far_tokens[:seqs].float().mean(1).sum().item()
        return near / len(own), far / len(own)

    def chosen(self, seqs: int) -> Tensor:
        """`[layers, seqs, kv_heads, k]`: what the last step's own queries picked, where all layers pick as many."""
        return torch.stack([lists.chosen[:seqs] for lists in self._by_layer().values()])

    def _by_layer(self) -> dict[int, Lists]:
        own = {layer: lists for (layer, ahead), lists in self.mapped.items() if not ahead} | self._own
        if self.once:
            own |= {layer: self.mapped[layer, True] for layer in self.foreseen}
        return dict(sorted(own.items()))

    def _make(self, layer: int, count: int, mapped: bool) -> Lists:
        shape = self.layers[layer]
        heads, places = shape.kv_heads, self.places(layer)
        size = self.batch * heads * (count + 1)
        if mapped and shape.device.type == "cuda":
            memory = host_memory(4 * size, shape.device).view(torch.int32)
        else:
            memory = torch.zeros(size, dtype=torch.int32, device=shape.device)
        far, far_tokens = torch.split(memory, [self.batch * heads * count, self.batch * heads])
        near_most = max(count, places) if self.once else count
        kinds = ((near_most + self.ring, torch.int32), (0, torch.int32), (count, torch.int32), (count, torch.float32),
                 (places, torch.float32))  # fmt: skip
        near, near_tokens, chosen, wanted, worth = (
            torch.zeros((self.batch, heads, width) if width else (self.batch, heads), dtype=dtype, device=shape.device)
            for width, dtype in kinds
        )
        far = far.view(self.batch, heads, count)
        return Lists(near, near_tokens, far, far_tokens.view(self.batch, heads), chosen, wanted, worth)


def rows_of(recording: Recording) -> Rows:
    """A frame's columns as kernels take them."""
    there, n = recording.frame.there, recording.rows
    names = ("far", "far_tokens", "near", "near_tokens", "slots", "ids", "spill")
    return Rows(*(there(name, n) for name in names))
