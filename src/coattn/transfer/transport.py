"""How the bytes of a prompt cross: over the socket itself. `shm` and `nixl` override `Target` and `Source`.

Frames go over the channel in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.transfer.channel import Channel, Tick, digest
from coattn.transfer.layout import Span, raw

Frame = dict[str, Any]
Parts = Sequence[tuple[Span, Tensor]]


class Target:
    """The decode side: owns memory that the other side writes to. One per connection."""

    def take(self, nbytes: int) -> tuple[Tensor, Frame, int | None]:
        """New memory uint8 `[nbytes]` -> itself, what the other side must know of it, and its descriptor, if any."""
        return torch.empty(nbytes, dtype=torch.uint8), {}, None

    def land(self, channel: Channel, parts: Sequence[Tensor], tick: Tick) -> None:
        """Brings the bytes of the parts of the memory that a frame has named."""
        for part in parts:
            channel.read_into(raw(part), tick)

    def drop(self) -> None:
        """The other side has said that it is done: from here on it may not write to the memory."""

    def close(self) -> None:
        """From here on the other side cannot write to any memory. The memory lives while it is used."""
        self.drop()


class Source:
    """The prefill side: writes to that memory. One per connection, used by the thread that sends."""

    def begin(self, channel: Channel, frame: Frame, nbytes: int, tick: Tick) -> None:
        """The other side has `nbytes` for a prompt; frame: what it said of them."""

    def put(self, channel: Channel, frame: Frame, parts: Parts, tick: Tick) -> None:
        """Writes tensors of any device to where they belong, then sends `frame` with their digest.

        tick: raises when the lease is over; called before every write.
        """
        here = [x.to("cpu", span.dtype).contiguous() for span, x in parts]
        tick(0)
        channel.send(mark(frame, here), tick, [raw(x) for x in here])

    def end(self) -> None:
        """Ends the writes for this prompt."""

    def close(self) -> None:
        """Ends all writes."""
        self.end()


def mark(frame: Frame, parts: Sequence[Tensor]) -> Frame:
    """The frame with the digest of what it names."""
    return {**frame, "digest": digest([raw(part) for part in parts])}
