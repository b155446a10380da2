"""Memory that both processes map. It has no name, so nothing is left when they are killed.

The decode side makes a memory file, seals its size (else the other side could be killed by pages that are gone) and
sends its descriptor over the Unix socket. The system frees it when neither side maps it any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.transfer.channel import Channel, ChannelError, Tick
from coattn.transfer.transport import Frame, Parts, Source, Target, mark

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ShmTarget(Target):
    """A file for each prompt: a late write goes to a file that this side no longer reads."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def take(self, nbytes: int) -> tuple[Tensor, Frame, int | None]:
        self.drop()
        self._fd = os.memfd_create("coattn-prompt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        return _map(self._fd, nbytes), {}, self._fd

    def land(self, channel: Channel, parts: Sequence[Tensor], tick: Tick) -> None:
        """The bytes are there before the frame."""

    def drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class ShmSource(Source):
    """Copies each layer to where it belongs; from a GPU that is the only copy."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def begin(self, channel: Channel, frame: Frame, nbytes: int, tick: Tick) -> None:
        fd = channel.receive_fd(tick)
        try:
            if os.fstat(fd).st_size != nbytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ChannelError("the memory is not of the size of the prompt")
            self._memory = _map(fd, nbytes)
        except OSError as error:
            raise ChannelError(f"the memory cannot be mapped ({error.strerror})") from None
        finally:
            os.close(fd)

    def put(self, channel: Channel, frame: Frame, parts: Parts, tick: Tick) -> None:
        assert self._memory is not None
        here = [span.of(self._memory) for span, _ in parts]
        for view, (_, x) in zip(here, parts, strict=True):
            tick(0)
            view.copy_(x)
        channel.send(mark(frame, here), tick)

    def end(self) -> None:
        self._memory = None


def _map(fd: int, nbytes: int) -> Tensor:
    """uint8 `[nbytes]`; its tensors keep the mapping."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
