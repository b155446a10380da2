"""The decode side: has prompts read by other processes, and reads them itself where nobody else does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from coattn.engine.prompts import encode
from coattn.errors import CoattnError, ConfigError, DeadlineError, TransferError
from coattn.hf.prefilled import Prefilled
from coattn.part import check_number
from coattn.transfer.address import Address
from coattn.transfer.channel import TICK, ChannelError
from coattn.transfer.lease import LEAST, MOST
from coattn.transfer.link import Link
from coattn.transfer.watch import WAKE, CancelledError, Watch, check

if TYPE_CHECKING:
    from coattn.engine.llm import LLM

log = logging.getLogger("coattn.transfer")

PAUSE = 1.0
"""Seconds in which an address that failed is not asked again."""
READERS = 256
"""Prompts that may wait for their turn at a time, each on a thread that is made when it is first needed."""


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
                link.open(Watch(link.address, self._lease, None, _never))
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
                found = link.read(ids, Watch(link.address, self._lease, deadline, gone))
                self.counts["elsewhere_prompts"] += 1
                self.counts["elsewhere_tokens"] += len(ids)
                return found
            except (DeadlineError, CancelledError):
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


def _never() -> bool:
    return False
