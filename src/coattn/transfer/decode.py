"""The decode side: owns the memory, asks another process to read a prompt into it, and believes what it can check."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from coattn.cache import available
from coattn.cache.ledger import PLACE
from coattn.engine.prompts import encode
from coattn.errors import CoattnError, ConfigError, DeadlineError, InputError, TransferError
from coattn.hf.fingerprint import read_by
from coattn.hf.prefilled import Prefilled
from coattn.part import check_number
from coattn.transfer.address import Address
from coattn.transfer.channel import TICK, Channel, ChannelError, RefusedError, digest
from coattn.transfer.layout import Layout, Rows, Span, describe, raw
from coattn.transfer.lease import BEATS, LEAST, MOST, Lease
from coattn.transfer.prefill import COMPARED, FORMAT
from coattn.transfer.transport import Frame, Target, target

if TYPE_CHECKING:
    from coattn.engine.llm import LLM

log = logging.getLogger("coattn.transfer")

PAUSE = 1.0
"""Seconds in which an address that failed is not asked again."""
READERS = 256
"""Prompts that may wait for their turn at a time, each on a thread that is made when it is first needed."""
WAKE = "Start `coattn serve --role prefill` there, or wait until it is ready."


class _Watch:
    """What is looked at while this side waits: the lease, the deadline, and whether anybody still wants the answer."""

    def __init__(self, where: Address, lease: float, deadline: float | None, cancelled: Callable[[], bool]) -> None:
        self.where, self.lease = where, Lease(lease)
        self._deadline, self._cancelled = deadline, cancelled
        self._beat = time.monotonic()

    def __call__(self, n: int) -> None:
        """Raises TransferError when the other side was not heard of for a lease, DeadlineError when it is too late."""
        if n:
            self.lease.renew()
        if self.lease.over:
            raise TransferError(f"{self.where} was not heard of for {self.lease.seconds:g} s.", WAKE)
        check(self._deadline, self._cancelled)

    def beating(self, channel: Channel) -> Callable[[int], None]:
        """The same, with heartbeats for the other side; only while nothing else is sent."""

        def tick(n: int) -> None:
            self(n)
            now = time.monotonic()
            if now - self._beat >= self.lease.seconds / BEATS:
                self._beat = now
                channel.send({"op": "beat"}, self)

        return tick


class Link:
    """A connection to one address, made when it is first needed, and again after it was lost."""

    def __init__(self, address: Address, key: bytes, llm: LLM) -> None:
        self.address, self._key, self._llm = address, key, llm
        self._shapes = llm.runner.runtime.layers
        self._channel: Channel | None = None
        self._target: Target | None = None
        self.asleep = 0.0
        """Until when it is not asked, on the monotonic clock."""

    def open(self, watch: _Watch) -> Channel:
        """Raises InputError where the two sides do not fit, TransferError where nobody is there."""
        if self._channel is not None:
            return self._channel
        self._target = target(self.address.kind)
        try:
            channel = Channel(self.address.connect(), self._key, called=False, tick=watch)
        except RefusedError:
            raise InputError(f"{self.address} has another key.", "Give both sides the same key.") from None
        except (OSError, ChannelError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise TransferError(f"{self.address} cannot be reached: {said}.", WAKE) from None
        self._channel = channel
        frame: Frame = {"op": "open", "format": FORMAT, "kind": self.address.kind}
        known = self._llm.fingerprints()
        frame["fingerprints"] = {name: known[name] for name in COMPARED}
        frame["shapes"] = describe(self._shapes, self._llm.vocabulary)
        channel.send(frame, watch)
        answer = channel.receive(watch)
        if answer["op"] != "opened":
            self.close()
            raise InputError(
                f"{self.address} does not read for this process: {answer.get('why')}",
                "Start both sides with the same model, dtype and version.",
            )
        return channel

    def read(self, tokens: Sequence[int], watch: _Watch) -> Prefilled:
        """Raises TransferError, InputError or DeadlineError; then the memory is nobody's."""
        if self._channel is not None:  # it may have ended since the last prompt
            try:
                return self._read(tokens, watch)
            except TransferError as error:
                if self._channel is not None or watch.lease.over:
                    raise
                log.info("%s It is called again.", error.sentence)
        return self._read(tokens, watch)

    def _read(self, tokens: Sequence[int], watch: _Watch) -> Prefilled:
        memory: torch.Tensor | None = None
        try:
            channel = self.open(watch)
            assert self._target is not None
            layout = Layout(self._shapes, self._llm.vocabulary, len(tokens))
            available.require(layout.size, "A prompt that is read elsewhere", PLACE["host"])
            memory, told, fd = self._target.take(layout.size)
            frame = {"op": "read", "tokens": len(tokens), "lease": watch.lease.seconds, **told}
            channel.send(frame, watch, [raw(torch.tensor(tokens, dtype=torch.int32))], fd)
            scales = self._receive(channel, self._target, layout, memory, watch)
            channel.send({"op": "release"}, watch)
            self._target.drop()
        except _FailedError as error:
            raise TransferError(f"{self.address} could not read the prompt: {error}", "") from None
        except BaseException as error:
            self.close()  # in the middle of a frame, or with a writer that may still write
            memory = None
            traceback.clear_frames(error.__traceback__)  # else the memory would live as long as the error
            if isinstance(error, CoattnError) or not isinstance(error, Exception):
                raise
            raise TransferError(f"{self.address} was lost while it read a prompt: {error}.", WAKE) from error
        return layout.prefilled(memory, tokens, scales, read_by(self._llm.model))

    def close(self) -> None:
        """Afterwards nobody writes to what was the memory of a prompt."""
        channel, self._channel = self._channel, None
        way, self._target = self._target, None
        if channel is not None:
            channel.close()
        if way is not None:
            way.close()

    def _receive(
        self, channel: Channel, way: Target, layout: Layout, memory: torch.Tensor, watch: _Watch
    ) -> list[float]:
        """Takes every row once, in order, each with its digest -> the scales of the layers."""
        tick = watch.beating(channel)
        tokens, queries = [0] * len(layout.shapes), [0] * len(layout.shapes)
        while True:
            frame = channel.receive(tick)
            op = frame["op"]
            if op == "layer":
                rows = _rows(frame, tokens, queries, layout)
                self._take(channel, way, layout.rows(rows), memory, frame, tick)
                tokens[rows.layer], queries[rows.layer] = rows.end, max(queries[rows.layer], rows.last)
            elif op == "done":
                if set(tokens) != {layout.tokens} or set(queries) != {layout.queries}:
                    raise ChannelError("layers are missing")
                self._take(channel, way, [layout.logits()], memory, frame, tick)
                scales = frame.get("scales")
                if not isinstance(scales, list) or len(scales) != len(layout.shapes):
                    raise ChannelError("scales are missing")
                return [float(each) for each in scales]
            elif op == "failed":
                channel.send({"op": "release"}, watch)
                way.drop()
                raise _FailedError(str(frame.get("why")))
            elif op != "beat":
                raise ChannelError(f"it says {op[:40]!r}")

    def _take(
        self, channel: Channel, way: Target, spans: Sequence[Span], memory: torch.Tensor, frame: Frame, tick: Any
    ) -> None:
        parts = [span.of(memory) for span in spans if span.nbytes]
        way.land(channel, parts, tick)
        if digest([raw(part) for part in parts]) != frame.get("digest"):
            raise ChannelError("what came is not what was sent")


class RemotePrefill:
    """Has prompts read by other processes, for one engine.

    addresses: of `PrefillServer`s of the same model, one or several; each reads one prompt at a time.
    key: the secret that they share. lease: seconds after which a process that is not heard of counts as gone.
    fallback: whether this process reads a prompt itself when nobody else does; else that raises TransferError.
    """

    def __init__(
        self,
        llm: LLM,
        addresses: str | Sequence[str],
        *,
        key: bytes = b"",
        lease: float = 5.0,
        fallback: bool = True,
    ) -> None:
        check_number("lease", lease, LEAST, MOST)
        found = [Address.of(each) for each in ([addresses] if isinstance(addresses, str) else addresses)]
        if not found:
            raise ConfigError("There is no address of a process that reads prompts.", "Give at least one.")
        for each in found:
            each.check_key(key)
        self._llm, self._lease, self._fallback = llm, lease, fallback
        llm.fingerprints()  # reads every weight: not while somebody waits
        self._links = [Link(each, key, llm) for each in found]
        self._free = list(self._links)
        self._turn = threading.Condition()
        self._closed = False
        self.threads = ThreadPoolExecutor(READERS, "coattn-elsewhere")
        """For an event loop that must not wait for `read`."""
        self.counts = {"elsewhere_prompts": 0, "elsewhere_tokens": 0, "elsewhere_failed": 0}

    def attach(self) -> None:
        """The engine's server asks here from now on, and the engine closes this when it closes."""
        self._llm.elsewhere = self
        self._llm.engine.closers.append(self.close)

    def check(self) -> None:
        """Raises InputError where an address is of another model or has another key; logs who is not there yet."""
        for link in self._links:
            try:
                link.open(_Watch(link.address, self._lease, None, _never))
            except TransferError as error:
                log.warning("%s Until then prompts are read here.", error.sentence)
            except ChannelError as error:
                link.close()
                log.warning("%s: %s.", link.address, error)

    def read(
        self,
        prompt: Any,
        *,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        salt: bytes = b"",
    ) -> Prefilled | list[int]:
        """A prompt as `LLM.generate` takes it -> the prompt that was read elsewhere, for `LLM.generate`.

        -> its token ids where nobody else could read it; with `fallback=False` that raises TransferError. Also where
        half of it or more is stored here already, under this `salt`.
        timeout: seconds after which it raises DeadlineError. cancelled: asked now and then; true ends it.
        """
        ids = encode(prompt, self._llm.tokenizer, self._llm.vocabulary)
        if 2 * self._llm.reuse.known(ids, salt) >= len(ids):
            return ids
        deadline = None if timeout is None else time.monotonic() + timeout

        def gone() -> bool:
            return self._closed or (cancelled is not None and cancelled())

        why = "No process that reads prompts can be reached.", WAKE
        for link in self._awake():
            self._acquire(link, deadline, gone)
            try:
                found = link.read(ids, _Watch(link.address, self._lease, deadline, gone))
                self.counts["elsewhere_prompts"] += 1
                self.counts["elsewhere_tokens"] += len(ids)
                return found
            except (DeadlineError, _CancelledError):
                raise
            except CoattnError as fault:
                link.asleep = time.monotonic() + PAUSE
                self.counts["elsewhere_failed"] += 1
                why = fault.sentence, fault.hint
                log.warning("%s", fault.sentence)
            finally:
                self._release(link)
        if not self._fallback:
            raise TransferError(*why)
        return ids

    def report(self) -> dict[str, int]:
        """Prompts and tokens that were read elsewhere, and how often that failed."""
        return dict(self.counts)

    def close(self) -> None:
        """Closes every connection; what is being read is cancelled."""
        with self._turn:
            self._closed = True
            while len(self._free) < len(self._links):
                self._turn.wait()
        for link in self._links:
            link.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> RemotePrefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _awake(self) -> list[Link]:
        """Those to ask, the ones that nobody uses first."""
        now = time.monotonic()
        with self._turn:
            return sorted((link for link in self._links if link.asleep <= now), key=lambda link: link not in self._free)

    def _acquire(self, link: Link, deadline: float | None, cancelled: Callable[[], bool]) -> None:
        with self._turn:
            while link not in self._free:
                self._turn.wait(TICK)
                check(deadline, cancelled)
            if self._closed:
                raise TransferError("This engine is closed.", "")
            self._free.remove(link)

    def _release(self, link: Link) -> None:
        with self._turn:
            self._free.append(link)
            self._turn.notify_all()


class _FailedError(Exception):
    """The other side is there, but could not read the prompt."""


class _CancelledError(TransferError):
    """Nobody wants the answer any more."""


def check(deadline: float | None, cancelled: Callable[[], bool]) -> None:
    """Raises what ends a wait."""
    if deadline is not None and time.monotonic() > deadline:
        raise DeadlineError("The prompt was not read by the request's deadline.", "Ask for less, or try again later.")
    if cancelled():
        raise _CancelledError("The request was cancelled.", "")


def _never() -> bool:
    return False


def _rows(frame: Frame, tokens: Sequence[int], queries: Sequence[int], layout: Layout) -> Rows:
    """What a frame names, if it is what comes next of its layer."""
    layer, rows = frame.get("layer"), frame.get("rows")
    if type(layer) is not int or not 0 <= layer < len(tokens) or not isinstance(rows, list) or len(rows) != 4:
        raise ChannelError("a layer has no name")
    if not all(type(each) is int for each in rows):
        raise ChannelError("a layer's rows are not numbers")
    start, end, first, last = rows
    if start != tokens[layer] or not start < end <= layout.tokens:
        raise ChannelError("rows are out of order")
    if not 0 <= first <= last <= layout.queries or (first < last and first != queries[layer]):
        raise ChannelError("queries are out of order")
    return Rows(layer, start, end, first, last)
