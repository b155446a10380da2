"""Bytes by NIXL, which writes into the other side's DRAM over what UCX finds: RDMA, shared memory or TCP.

A write may be under way when its lease runs out. So memory is freed after the agent that it was registered with: a
transfer that did not end well ends its agent first.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.errors import UnsupportedError
from coattn.transfer.channel import Channel, ChannelError, GoneError, Tick
from coattn.transfer.transport import Frame, Parts, Source, Target, mark

POLL_S = 2e-4
"""Between two looks at the state of a transfer."""


def _agent() -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise UnsupportedError(
            f"nixl:// needs the package nixl, which cannot be imported: {error}.", 'Run `pip install "coattn[nixl]"`.'
        ) from None
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, where data goes
    # its own thread would take a whole core, also while there is nothing to do
    chosen = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    try:
        return nixl_agent(uuid.uuid4().hex, chosen)
    except Exception as error:  # NIXL has exceptions of its own
        raise UnsupportedError(f"NIXL does not run here: {error}.", "Use tcp:// or shm://.") from error


class NixlTarget(Target):
    """An agent, its thread, and memory that is registered with it while a prompt is read."""

    def __init__(self) -> None:
        self._agent = _agent()
        self._held: tuple[Any, Tensor] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, nbytes: int) -> tuple[Tensor, Frame, int | None]:
        self.drop()
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._held = self._agent.register_memory(memory), memory
        told = {"address": memory.data_ptr(), "agent": base64.b64encode(self._agent.get_agent_metadata()).decode()}
        self._stop.clear()
        self._thread = threading.Thread(target=self._go_on, name="coattn-nixl", daemon=True)
        self._thread.start()
        return memory, told, None

    def land(self, channel: Channel, parts: Sequence[Tensor], tick: Tick) -> None:
        """The bytes are there before the frame."""

    def drop(self) -> None:
        self._rest()
        if self._held is not None:
            self._agent.deregister_memory(self._held[0])
            self._held = None

    def close(self) -> None:
        self._rest()
        held, self._held = self._held, None
        self._agent = None  # before the memory that it may still write to
        del held

    def _go_on(self) -> None:
        agent = self._agent
        while not self._stop.wait(POLL_S):
            agent.get_new_notifs()

    def _rest(self) -> None:
        """Stops the thread that uses the agent."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None


class NixlSource(Source):
    """An agent, and memory from which it writes."""

    def __init__(self) -> None:
        self._agent = _agent()
        self._peer: Any = None
        self._base = 0
        self._staging: tuple[Any, Tensor] | None = None

    def begin(self, channel: Channel, frame: Frame, nbytes: int, tick: Tick) -> None:
        try:
            self._base = int(frame["address"])
            told = base64.b64decode(frame["agent"], validate=True)
            self._forget()
            self._peer = self._agent.add_remote_agent(told)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise ChannelError("it does not say where to write") from None
        except Exception as error:  # NIXL has exceptions of its own
            raise ChannelError(f"NIXL does not take its agent ({type(error).__name__})") from None

    def put(self, channel: Channel, frame: Frame, parts: Parts, tick: Tick) -> None:
        staging = self._stage(sum(span.nbytes for span, _ in parts))
        here, own, theirs, at = [], [], [], 0
        for span, x in parts:
            view = staging[at : at + span.nbytes].view(span.dtype).view(span.size)
            view.copy_(x)
            here.append(view)
            own.append((staging.data_ptr() + at, span.nbytes, 0))
            theirs.append((self._base + span.offset, span.nbytes, 0))
            at += span.nbytes
        tick(0)
        try:
            self._write(own, theirs, tick)
        except (ChannelError, GoneError):
            raise
        except Exception as error:
            raise ChannelError(f"NIXL could not write ({type(error).__name__})") from None
        channel.send(mark(frame, here), tick)

    def close(self) -> None:
        self._forget()
        self._agent = self._staging = None

    def _forget(self) -> None:
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer)
            self._peer = None

    def _stage(self, nbytes: int) -> Tensor:
        if self._staging is None or len(self._staging[1]) < nbytes:
            if self._staging is not None:
                self._agent.deregister_memory(self._staging[0])
            memory = torch.empty(nbytes, dtype=torch.uint8)
            self._staging = self._agent.register_memory(memory), memory
        return self._staging[1]

    def _write(self, own: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]], tick: Tick) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), self._peer
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                tick(0)
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ChannelError(f"NIXL says {state}")
        finally:
            agent.release_xfer_handle(handle)
