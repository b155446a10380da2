"""What sessions need of an engine, and an engine of the client that has prompts read elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

from coattn.engine.engine import Engine
from coattn.engine.handle import Handle
from coattn.engine.session_file import Sessions
from coattn.engine.store.sequence_store import SequenceStore
from coattn.hf.prefilled import Prefilled
from coattn.method.row import Composed


class SessionHost(Protocol):
    """Runs the turns of sessions: see `LLM`."""

    engine: Engine
    store: SequenceStore
    sessions: Sessions
    composed: Composed
    tokenizer: Any
    vocabulary: int
    max_length: int

    @property
    def submit(self) -> Callable[..., Handle]:
        """Puts a turn in line."""

    def fingerprints(self) -> dict[str, str]:
        """What the model and its tokenizer are."""

    def forget_session(self, session: object) -> None:
        """A session was closed."""


class PromptReader(Protocol):
    """Has prompts read by other processes: see `coattn.transfer.RemotePrefill`."""

    @property
    def threads(self) -> Executor:
        """On which an event loop waits for `read`."""

    def read(
        self,
        prompt: Any,
        *,
        timeout: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        salt: bytes = b"",
    ) -> Prefilled | list[int]:
        """The prompt that was read elsewhere, or its token ids."""

    def report(self) -> dict[str, int]:
        """Prompts and tokens that were read elsewhere, and how often that failed."""
