"""What the ways of the bytes have in common. Frames go over the channel in any case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from coattn.errors import UnsupportedError
from coattn.transfer.channel import Channel, Tick, digest
from coattn.transfer.layout import Span, raw

Frame = dict[str, Any]
Parts = Sequence[tuple[Span, Tensor]]


class Target(Protocol):
    """The decode side: owns memory that the other side writes to. One per connection."""

    def take(self, nbytes: int) -> tuple[Tensor, Frame, int | None]:
        """New memory uint8 `[nbytes]` -> itself, what the other side must know of it, and its descriptor, if any."""

    def land(self, channel: Channel, parts: Sequence[Tensor], tick: Tick) -> None:
        """A frame has named these parts of the memory: afterwards the bytes are there."""

    def drop(self) -> None:
        """Nobody may write to the memory any more; the other side has said that it is done."""

    def close(self) -> None:
        """Nobody can write to any memory any more, whatever the other side does. The memory lives while it is used."""


class Source(Protocol):
    """The prefill side: writes there. One per connection, used by the thread that sends."""

    def begin(self, channel: Channel, frame: Frame, nbytes: int, tick: Tick) -> None:
        """The other side has `nbytes` for a prompt; frame: what it said of them."""

    def put(self, channel: Channel, frame: Frame, parts: Parts, tick: Tick) -> None:
        """Writes tensors of any device to where they belong, then sends `frame` with their digest.

        tick: raises once the lease is over; asked before every write.
        """

    def end(self) -> None:
        """Writes no more for this prompt."""

    def close(self) -> None:
        """Writes no more at all."""


def target(kind: str) -> Target:
    """By the kind of an address. Raises UnsupportedError where it cannot be used here."""
    if kind == "nixl":
        from coattn.transfer.nixl import NixlTarget

        return NixlTarget()
    if kind == "shm":
        from coattn.transfer.shm import ShmTarget

        return ShmTarget()
    from coattn.transfer.tcp import TcpTarget

    return TcpTarget()


def source(kind: str) -> Source:
    """By the kind of an address. Raises UnsupportedError where it cannot be used here."""
    if kind == "nixl":
        from coattn.transfer.nixl import NixlSource

        return NixlSource()
    if kind == "shm":
        from coattn.transfer.shm import ShmSource

        return ShmSource()
    if kind == "tcp":
        from coattn.transfer.tcp import TcpSource

        return TcpSource()
    raise UnsupportedError(f"There is no transport {kind!r}.", "Use tcp, shm or nixl.")


def mark(frame: Frame, parts: Sequence[Tensor]) -> Frame:
    """The frame with the digest of what it names."""
    return {**frame, "digest": digest([raw(part) for part in parts])}
