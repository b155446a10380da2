"""The prefill side: reads prompts for other processes, one after the other."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from typing import Any

import torch

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.hf.families import positions, room
from coattn.hf.fingerprint import fingerprints
from coattn.hf.forward import Session
from coattn.hf.load import Loaded
from coattn.hf.prefilled import read_prompt, refuse_states
from coattn.method.row import Method, compose
from coattn.method.table import find_method
from coattn.part import MOST as MOST_TOKENS
from coattn.part import check_count
from coattn.transfer.address import Address, same_user
from coattn.transfer.channel import TICK_S, Channel, ChannelError, Frame, GoneError
from coattn.transfer.job import Job, Part, Sends, failed
from coattn.transfer.layout import Layout, introduce, mismatch, raw
from coattn.transfer.lease import LEAST, MOST, Lease
from coattn.transfer.transport import map_shared
from coattn.units import parse_bytes

log = logging.getLogger("coattn.transfer")

GREETING = 5.0
"""Seconds in which a caller must have said who it is."""
PAUSE = 0.5
"""Seconds until a call that could not be taken is tried again."""
CALLERS = 64
"""Connections at a time."""


class PrefillServer(contextlib.AbstractContextManager["PrefillServer"]):
    """Reads prompts at an address, one at a time, from `__init__` to `close`; the model belongs to it until then.

    loaded: the model. address: `tcp://HOST:PORT` (port 0 takes a free one) or `shm:///PATH`.
    key: the secret that callers must have; needed where others than this machine could call.
    method: an exact row that prompts are read under; gpu_kv, host_kv, params: for it. chunk: tokens read at a time.
    """

    def __init__(
        self,
        loaded: Loaded,
        address: str,
        *,
        key: bytes = b"",
        method: str | Method = "full",
        gpu_kv: int | float | str | None = None,
        host_kv: int | float | str | None = None,
        chunk: int = 2048,
        **params: Any,
    ) -> None:
        check_count("chunk", chunk, 1)
        self.row = exact_row(method, **params)
        self._budgets = parse_bytes(gpu_kv, "gpu_kv"), parse_bytes(host_kv, "host_kv")
        given = Address.of(address)
        given.check_key(key)
        self._key, self._chunk = key, chunk
        with contextlib.ExitStack() as undo:
            self._session = undo.enter_context(Session(loaded.model))
            refuse_states(self._session)
            known = fingerprints(loaded.model, loaded.tokenizer)
            self._socket = undo.enter_context(contextlib.closing(given.listen()))
            self._socket.settimeout(TICK_S)
            self._undo = undo.pop_all()
        self.address = given if given.shared else Address(given.host, self._socket.getsockname()[1])
        self._own = introduce(known, self._session.layers, self._session.vocabulary)
        self.counts = {"prompts": 0, "tokens": 0, "failed": 0}
        """Prompts that were read to their end, their tokens, and those that were not."""
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._callers: dict[socket.socket, Channel | None] = {}
        self._active: set[Job] = set()
        """Those that a caller waits for."""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._model = threading.Thread(target=self._read_all, name="coattn-prefill", daemon=True)
        self._model.start()

    def serve(self) -> None:
        """Takes calls until `stop`."""
        while not self._stopping.is_set():
            try:
                link, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # such as too many open files: the caller is still there afterwards
                log.warning("A call could not be taken: %s.", error.strerror)
                self._stopping.wait(PAUSE)
                continue
            if len(self._callers) >= CALLERS or (link.family == socket.AF_UNIX and not same_user(link)):
                link.close()
                continue
            if link.family != socket.AF_UNIX:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._callers[link] = None
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(threading.Thread(target=self._talk, args=(link,), daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Takes no more calls; what is being read goes on. From any thread, or a signal's handler."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def close(self, drain: float = 0.0) -> None:
        """Ends. What is being read may take up to `drain` seconds more."""
        self.stop()
        end = time.monotonic() + drain
        while time.monotonic() < end and self._active:
            time.sleep(TICK_S)
        for channel in list(self._callers.values()):
            if channel is not None:
                channel.shutdown()
        for thread in self._threads:
            thread.join(GREETING)
        self._jobs.put(None)
        self._model.join()
        self._undo.close()
        if self.address.shared:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_all(self) -> None:
        """The thread of the model: one prompt after the other."""
        while (job := self._jobs.get()) is not None:
            try:
                self._read(job)
                self.counts["prompts"] += 1
                self.counts["tokens"] += len(job.tokens)
            except GoneError:
                self.counts["failed"] += 1
            except BaseException as error:  # whatever it is, the next prompt is read
                self.counts["failed"] += 1
                with contextlib.suppress(GoneError):
                    job.put(Part(failed("The step failed", error), []))
            finally:
                job.read.set()
                del job  # and what it has not sent

    def _read(self, job: Job) -> None:
        job.check()
        probe = Sends(job)
        count = len(job.tokens)
        room("the model", positions(self._session.model.config), count)
        logits = read_prompt(self._session, self.row, Ledger(*self._budgets), job.tokens, [count], self._chunk, [probe])
        probe.finish(logits[count].float())

    def _talk(self, link: socket.socket) -> None:
        """The thread of one caller."""
        end = time.monotonic() + GREETING

        def in_time(_: int) -> None:
            if time.monotonic() > end:
                raise ChannelError("it says nothing")

        try:
            channel = Channel(link, self._key, called=True, tick=in_time)
            with contextlib.closing(channel):
                self._callers[link] = channel
                why = mismatch(channel.receive(in_time), self._own)
                channel.send({"op": "opened"} if why is None else {"op": "refused", "why": why}, in_time)
                while why is None and not self._stopping.is_set():
                    frame = channel.receive(self._idle)
                    if frame["op"] == "read":
                        self._serve_one(channel, frame)
        except (ChannelError, GoneError) as error:
            log.debug("A caller is gone: %s.", error)
        except Exception:
            log.exception("A caller is given up.")
        finally:
            self._callers.pop(link, None)

    def _idle(self, _: int) -> None:
        if self._stopping.is_set():
            raise ChannelError("this side stops")

    def _serve_one(self, channel: Channel, frame: Frame) -> None:
        count, seconds = frame.get("tokens"), frame.get("lease")
        most = positions(self._session.model.config) or MOST_TOKENS
        if type(count) is not int or not 0 < count <= most or not isinstance(seconds, int | float):
            raise ChannelError("it asks for nothing that could be read")
        lease = Lease(min(MOST, max(LEAST, float(seconds))))
        layout = Layout(self._session.layers, self._session.vocabulary, count)

        def on_bytes(n: int) -> None:
            if n:
                lease.renew()
            if lease.over:
                raise ChannelError("its lease is over")

        shared = map_shared(channel.receive_fd(on_bytes), layout.size) if self.address.shared else None
        ids = torch.empty(count, dtype=torch.int32)
        channel.read_into(raw(ids), on_bytes)
        job = Job(channel, shared, ids.long(), layout, lease)
        sender = threading.Thread(target=job.send, name="coattn-send", daemon=True)
        sender.start()
        self._active.add(job)
        self._jobs.put(job)
        try:
            while channel.receive(on_bytes)["op"] != "release":
                pass
        finally:
            lease.drop()  # whatever the end was: nothing is written from here on
            sender.join()
            job.read.wait()
            self._active.discard(job)


def exact_row(method: str | Method, **params: Any) -> Any:
    """The composed row. Raises ConfigError where it does not read prompts exactly."""
    row = compose(find_method(method), **params)
    if not row.exact:
        raise ConfigError(
            f"Prompts are read exactly for others, but method {row.method.name!r} is not exact.",
            "Use full, cpu or offload on the side that reads; the other side may have any method.",
        )
    return row
