"""From one decode step to the next: what was read, and for how long."""

from __future__ import annotations

import time

from coattn.engine.chunk_policy import ChunkPolicy


class StepTimer:
    """Tells the chunk policy what steps take. A decode step is due when what was read has taken the promised time."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self.spent = 0.0
        """Tokens read since the last decode step."""
        self.passed = 0.0
        """Of these, what the layers have passed of the running chunk, which is not done."""
        self._decoded: float | None = None
        """When the last decode step ended, unless nobody has decoded since."""

    def stop(self) -> None:
        """Nobody is here: how long that takes says nothing."""
        self._decoded = None

    def clear(self) -> None:
        """Nobody waits for a decode step."""
        self._decoded, self.spent = None, 0.0

    def choose(self) -> None:
        """No chunk is running."""
        self.passed = 0.0

    def layer(self, tokens: int) -> None:
        """Another layer of a chunk of so many tokens has begun."""
        share = tokens / self._policy.layers
        self.spent += share
        self.passed += share

    def late(self, tokens: int) -> bool:
        """Whether a decode step comes before the next layer of a chunk of so many tokens."""
        room = self._policy.room()
        return self.spent > 0 and (room is None or self.spent + tokens / self._policy.layers > room)

    def read(self, tokens: int) -> None:
        """The running chunks, of so many tokens together, are done."""
        self.spent = self.spent - self.passed + tokens
        self.passed = 0.0

    def decode(self) -> None:
        """A decode step is done."""
        now = time.perf_counter()
        if self._decoded is not None:
            self._policy.note(self.spent, now - self._decoded)
        self._decoded, self.spent = now, 0.0
