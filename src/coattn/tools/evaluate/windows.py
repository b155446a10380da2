"""Which parts of a text are evaluated: windows of equal length that start at several depths."""

from typing import NamedTuple

from torch import Tensor

from coattn.errors import InputError


class Windows(NamedTuple):
    """Windows of a text: `prefill` tokens that are read exactly, then `decode` steps."""

    starts: tuple[int, ...]
    prefill: int
    decode: int

    @property
    def length(self) -> int:
        """Tokens of each."""
        return self.prefill + self.decode

    def of(self, ids: Tensor) -> Tensor:
        """ids `[tokens]` of the text -> `[windows, length]`."""
        return ids.unfold(0, self.length, 1)[list(self.starts)]


def choose(
    tokens: int,
    *,
    decode: int,
    prefill: int | None = None,
    length: int | None = None,
    start: int = 0,
    stride: int | None = None,
    name: str = "The text",
) -> Windows:
    """Windows of a text of `tokens` tokens.

    Without a stride there is one window: `length` tokens, or `prefill` + `decode`. With one, a window starts every
    `stride` tokens from `start` on, as many as fit in the first `length` tokens, or in the whole text.
    """
    if length is not None and tokens < length:
        raise InputError(f"{name} has only {tokens:,} tokens, but --length is {length:,}.", f"Give --length {tokens}.")
    end = tokens if length is None else length
    if prefill is None:
        assert length is not None, "a length or a prefill says how long a window is"
        if stride is not None:
            raise InputError("--stride needs --prefill.", "Say how many tokens each window prefills.")
        prefill = length - start - decode
        if prefill < 1:
            taken = f"--start is {start:,} and --decode is {decode:,}" if start else f"--decode is {decode:,}"
            raise InputError(
                f"{taken}, but --length is {length:,}: nothing is left to prefill.",
                f"Give --length {start + decode + 1} or more.",
            )
    size = prefill + decode
    if start + size > end:
        raise InputError(
            f"{name} has {tokens:,} tokens, but the first window ends after {start + size:,}.",
            f"Give --prefill {end - start - decode} or less."
            if end - start > decode
            else "Give a longer text, or less of --decode and --start.",
        )
    starts = range(start, end - size + 1, stride) if stride is not None else (start,)
    return Windows(tuple(starts), prefill, decode)
