"""Tokens to text, as they come: no half characters, and nothing that may belong to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HALF = "\ufffd"
"""What decoders put in place of bytes that are not (yet) a character."""


class Pieces:
    """One answer's tokens in, its text out in pieces that add up to what the tokenizer makes of all of them at once.

    Special tokens have no text unless `special` asks for it. Without a tokenizer there is no text at all.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self.tokenizer, self._skip = tokenizer, not special
        self.ids: list[int] = []
        self.emitted = 0
        """Characters handed out so far."""
        self._start, self._read = 0, 0  # ids up to `_read` are text; those from `_start` are its context
        self._backend = getattr(tokenizer, "backend_tokenizer", None)

    def push(self, token: int) -> str:
        """The text that became final with this token, often none."""
        if self.tokenizer is None:
            return ""
        self.ids.append(token)
        # the last few tokens with and without the unread ones: the difference is new text
        before = self._decode(self.ids[self._start : self._read])
        after = self._decode(self.ids[self._start :])
        if after.endswith(HALF) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self.ids)
        self.emitted += len(after) - len(before)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as the tokenizer shows them."""
        if self.tokenizer is None or not self.ids:
            return ""
        piece = self._decode(self.ids)[self.emitted :]
        self.emitted += len(piece)
        return piece

    def part_of(self, text: str) -> tuple[int, str]:
        """How many of the first tokens say a beginning of `text`, and what of it they do not say."""
        for count in range(len(self.ids), 0, -1):
            said = self._decode(self.ids[:count])
            if text.startswith(said):
                return count, text[len(said) :]
        return 0, text

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=self._skip))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))


class StopText:
    """Holds back what may be the beginning of a stop string, and cuts before the first one that completes.

    The result does not depend on how the text is cut into pieces: of several stop strings the one that ends first
    counts, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.matched: str | None = None
        """The one that came."""
        self.counts = True
        """Whether stop strings that begin now are looked for."""
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether one came."""
        return self.matched is not None

    def push(self, piece: str) -> str:
        """The text that may be shown. After a stop string: nothing more."""
        if self.stopped or not piece:
            return ""
        if not self.stops or not self.counts:
            return piece
        text = self._held + piece
        cut, self.matched = self._find(text)
        keep = len(text) - self._suspicious(text) if cut is None else cut
        self._held = "" if self.stopped else text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int | None, str | None]:
        """Where the stop string begins, and which one it is."""
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else (None, None)

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self.stops):
                return n
        return 0


class TextStream:
    """`Pieces`, then `StopText`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], special: bool = False) -> None:
        self._pieces, self.stop = Pieces(tokenizer, special), StopText(stops)
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def kept(self) -> tuple[int, str]:
        """How many of the tokens have only text before the stop string, and what the next one has before it."""
        return self._pieces.part_of(self.text)

    def push(self, token: int) -> str:
        return self._keep(self.stop.push(self._pieces.push(token)))

    def flush(self) -> str:
        """The rest, once no more tokens come."""
        if self.stop.stopped:
            return ""
        return self._keep(self.stop.push(self._pieces.flush()) + self.stop.flush())

    def _keep(self, text: str) -> str:
        if text:
            self.parts.append(text)
        return text
