"""The side streams of a running step, and when the work that its layers leave for the next step runs there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coattn.kernels.streams import SideStream


class StepStreams:
    """Runs parts of one step beside its layers. Without a GPU everything runs at once.

    The streams belong to the runtime and outlive the step: making one takes long. Steps that run at the same time are
    a prompt and a decode step between two of its layers. Only decode steps use `side`; only steps with a `co_step`,
    which have no decode step between their layers, use `decodes`.
    """

    def __init__(self, side: SideStream, decodes: SideStream, eager: bool) -> None:
        """side: for updates of indices and pools. decodes: for the decode step of a mixed step.

        eager: the step runs layer by layer and may fail between two layers; else it is being captured.
        """
        self.side, self.decodes, self.eager = side, decodes, eager
        self._at_commit: list[tuple[torch.device, Callable[[], None]]] = []
        self._pending: Callable[[], None] | None = None
        """While a step is captured: work that waits until the next layer attends."""

    def defer(self, device: torch.device, work: Callable[[], None], until_next_layer: bool) -> None:
        """Work that only the next step depends on: eager steps run it when they commit, since it cannot be undone.

        until_next_layer: a captured step starts it at the next `catch_up`, else now.
        """
        if self.eager:
            self._at_commit.append((device, work))
            return
        self._pending = work
        if not until_next_layer:
            self.catch_up(device)

    def catch_up(self, device: torch.device) -> None:
        """Starts the pending work beside what follows on the current stream."""
        work, self._pending = self._pending, None
        if work is not None:
            self.side.run(device, work)

    def run_deferred(self) -> None:
        """The step cannot fail any more: what its layers have left runs now."""
        for device, work in self._at_commit:
            self.side.run(device, work)
        self._at_commit.clear()

    def join(self) -> None:
        """The current streams wait for both side streams."""
        self.side.join()
        self.decodes.join()
