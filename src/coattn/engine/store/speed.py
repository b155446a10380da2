"""What reading a prompt and reading a disk cost, measured while they happen. Knows times alone."""

from __future__ import annotations

from collections.abc import Sequence

FADE = 0.9
"""What an observation counts once another one has come."""
BEYOND = 2
"""Attention makes later tokens dearer; how much is believed up to this multiple of the last position seen."""


class PromptSpeed:
    """Seconds of a token of a prompt: `a + b * position`, the line that fits what was read, newer reading more."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Of tokens, of tokens times position and its square, of seconds, of seconds times position."""
        self._seen = 0
        self._open: list[tuple[int, int]] = []
        """Read, in `_seconds` so far, but the device may not be done with them."""
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._sums[0] > 0

    def note(self, spans: Sequence[tuple[int, int]], seconds: float, waited: bool) -> None:
        """A step that read tokens `start .. end` of prompts took so long.

        waited: whether the device was done then; what it still does counts for later steps.
        """
        self._open += spans
        if not self._open:
            return
        self._seconds += seconds
        if waited:
            count = sum(end - start for start, end in self._open)
            middle = sum((end - start) * (start + end) / 2 for start, end in self._open) / max(1, count)
            new = (count, count * middle, count * middle**2, self._seconds, self._seconds * middle)
            self._sums = [FADE * old + value for old, value in zip(self._sums, new, strict=True)]
            self._seen = max(self._seen, *(end for _, end in self._open))
            self._open, self._seconds = [], 0.0

    def seconds(self, start: int, end: int) -> float:
        """What reading these tokens would take, as far as is known."""
        n, at, squared, s, s_at = self._sums
        if not n:
            return 0.0
        spread = n * squared - at * at
        slope = max(0.0, (n * s_at - at * s) / spread) if spread > 1e-6 * n * squared else 0.0
        base = (s - slope * at) / n
        if base < 0:
            base, slope = 0.0, s / max(at, 1e-9)
        return (end - start) * (base + slope * min((start + end) / 2, BEYOND * self._seen))

    def tokens_per_s(self) -> float | None:
        """At the positions that were read."""
        return self._sums[0] / self._sums[3] if self._sums[3] > 0 else None


class DiskSpeed:
    """Bytes per second of whole reads: file, digests and all."""

    def __init__(self) -> None:
        self._bytes = self._s = 0.0

    @property
    def known(self) -> bool:
        return self._s > 0

    def note(self, count: int, seconds: float) -> None:
        if count:
            self._bytes = FADE * self._bytes + count
            self._s = FADE * self._s + max(seconds, 1e-9)

    def seconds(self, count: int) -> float:
        """What reading so many bytes would take; nothing before anything is known."""
        return count * self._s / self._bytes if self.known else 0.0

    def bytes_per_s(self) -> float | None:
        return self._bytes / self._s if self.known else None
