"""Bytes over the socket itself, received straight into the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.transfer.channel import Channel, Tick
from coattn.transfer.layout import raw
from coattn.transfer.transport import Frame, Parts, mark


class TcpTarget:
    """Only this process writes to the memory: when the connection ends, nobody does."""

    def take(self, nbytes: int) -> tuple[Tensor, Frame, int | None]:
        return torch.empty(nbytes, dtype=torch.uint8), {}, None

    def land(self, channel: Channel, parts: Sequence[Tensor], tick: Tick) -> None:
        for part in parts:
            channel.read_into(raw(part), tick)

    def drop(self) -> None: ...

    def close(self) -> None: ...


class TcpSource:
    """Sends."""

    def begin(self, channel: Channel, frame: Frame, nbytes: int, tick: Tick) -> None: ...

    def put(self, channel: Channel, frame: Frame, parts: Parts, tick: Tick) -> None:
        here = [x.to("cpu", span.dtype).contiguous() for span, x in parts]
        tick(0)
        channel.send(mark(frame, here), tick, [raw(x) for x in here])

    def end(self) -> None: ...

    def close(self) -> None: ...
