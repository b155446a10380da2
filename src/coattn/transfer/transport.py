"""How the bytes of a prompt cross: after their frame over the socket, or in memory that both processes map (shm://).

That memory is a file without a name, so nothing is left when the processes are killed. The decode side makes it for one
prompt, seals its size (else the other side could be killed by pages that are gone) and sends its descriptor over the
Unix socket. The system frees it when neither side maps it any more. A late write goes to memory that nobody reads.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.transfer.channel import Channel, ChannelError, Frame, Tick, digest
from coattn.transfer.layout import Span, raw

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Parts = Sequence[tuple[Span, Tensor]]


def make_shared(nbytes: int) -> tuple[Tensor, int]:
    """New memory uint8 `[nbytes]` that another process can map, and its descriptor, which the caller closes."""
    fd = os.memfd_create("coattn-prompt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return _map(fd, nbytes), fd
    except BaseException:
        os.close(fd)
        raise


def map_shared(fd: int, nbytes: int) -> Tensor:
    """The memory of a descriptor that has come, which is closed. Raises ChannelError."""
    try:
        if os.fstat(fd).st_size != nbytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ChannelError("the memory is not of the size of the prompt")
        return _map(fd, nbytes)
    except OSError as error:
        raise ChannelError(f"the memory cannot be mapped ({error.strerror})") from None
    finally:
        os.close(fd)


def send_parts(channel: Channel, shared: Tensor | None, frame: Frame, parts: Parts, tick: Tick) -> None:
    """Brings tensors of any device to the other side, with `frame` and their digest.

    shared: memory that both sides map; into it from a GPU there is one copy. tick: raises when the lease is over;
    called before every write.
    """
    here = []
    for span, x in parts:
        if shared is None:
            here.append(x.to("cpu", span.dtype).contiguous())
        else:
            tick(0)
            here.append(span.of(shared).copy_(x))
    tick(0)
    views = [raw(x) for x in here]
    channel.send({**frame, "digest": digest(views)}, tick, views if shared is None else ())


def take_parts(channel: Channel, shared: bool, frame: Frame, parts: Sequence[Tensor], tick: Tick) -> None:
    """Has what a frame names in its place in memory, unchanged. Raises ChannelError."""
    views = [raw(part) for part in parts]
    if not shared:  # else the bytes are there before the frame
        for view in views:
            channel.read_into(view, tick)
    if digest(views) != frame.get("digest"):
        raise ChannelError("what came is not what was sent")


def _map(fd: int, nbytes: int) -> Tensor:
    """uint8 `[nbytes]`; its tensors keep the mapping."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
