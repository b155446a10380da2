"""The decode side: has prompts read by other processes; if none can, it reads them itself."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.prompts import encode
from coattn.errors import CoattnError, ConfigError, DeadlineError, TransferError
from coattn.hf.families import positions, room
from coattn.hf.prefilled import Prefilled
from coattn.part import check_number
from coattn.transfer.address import Address
from coattn.transfer.channel import TICK_S, ChannelError
from coattn.transfer.lease import LEAST, MOST, WAKE, CancelledError, Watch, check
from coattn.transfer.link import FailedError, Link

log = logging.getLogger("coattn.transfer")

PAUSE = 1.0
"""Seconds in which an address that was lost or late is not asked again."""
READERS = 256
"""Prompts that may wait for their turn at a time, each on a thread that is made when it is first needed."""


class RemotePrefill(AbstractContextManager["RemotePrefill"]):
    """Has prompts read by other processes, for one engine.

    addresses: of `PrefillServer`s of the same model, one or several; each reads one prompt at a time.
    key: the secret that they share. lease: seconds after which a process that is not heard of counts as gone.
    fallback: if no other process can read a prompt, this one reads it; without fallback it raises TransferError.
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
        places = [Address.of(each) for each in ([addresses] if isinstance(addresses, str) else addresses)]
        if not places:
            raise ConfigError("There is no address of a process that reads prompts.", "Give at least one.")
        for each in places:
            each.check_key(key)
        self._llm, self._lease, self._fallback = llm, lease, fallback
        llm.fingerprints()  # reads every weight: not while somebody waits
        self._links = [Link(each, key, llm) for each in places]
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
                link.open(Watch(link.address, self._lease, None, lambda: False))
            except TransferError as error:
                log.warning("%s Until then prompts are read here.", error.sentence)
            except ChannelError as error:
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

        -> its token ids if no other process could read it; with `fallback=False` that raises TransferError, or
        BudgetError where it does not fit there. Also where at least half of it is stored here, under this `salt`.
        timeout: seconds after which it raises DeadlineError. cancelled: asked now and then; true ends it.
        """
        ids = encode(prompt, self._llm.tokenizer, self._llm.vocabulary)
        room("the model", positions(self._llm.model.config), len(ids))
        if 2 * self._llm.store.sharing.stored_tokens(ids, salt) >= len(ids):
            return ids
        deadline = None if timeout is None else time.monotonic() + timeout

        def gone() -> bool:
            return self._closed or (cancelled is not None and cancelled())

        failure: CoattnError = TransferError("No process that reads prompts can be reached.", WAKE)
        tried: list[Link] = []
        while (link := self._acquire(tried, deadline, gone)) is not None:
            tried.append(link)
            try:
                prefilled = link.read(ids, Watch(link.address, self._lease, deadline, gone))
                self._count(elsewhere_prompts=1, elsewhere_tokens=len(ids))
                return prefilled
            except (DeadlineError, CancelledError):
                raise
            except CoattnError as fault:
                self._count(elsewhere_failed=1)
                log.warning("%s", fault.sentence)
                kind: type[CoattnError] = TransferError
                if isinstance(fault, FailedError):  # it is there, and may read the next one
                    kind = fault.kind
                else:
                    link.asleep = time.monotonic() + PAUSE
                failure = kind(fault.sentence, fault.hint)
            finally:
                with self._turn:
                    self._free.append(link)
                    self._turn.notify_all()
        if not self._fallback:
            raise failure
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self, tried: Sequence[Link], deadline: float | None, cancelled: Callable[[], bool]) -> Link | None:
        """The first link to become free of those that were not tried and are not asleep; None where there is none."""
        with self._turn:
            while not self._closed:
                now = time.monotonic()
                left = [link for link in self._links if link not in tried and link.asleep <= now]
                if not left:
                    return None
                free = next((link for link in self._free if link in left), None)
                if free is not None:
                    self._free.remove(free)
                    return free
                self._turn.wait(TICK_S)
                check(deadline, cancelled)
        raise TransferError("This engine is closed.", "")

    def _count(self, **more: int) -> None:
        with self._turn:
            for name, n in more.items():
                self.counts[name] += n
