"""Errors that a person can act on: one sentence that says what is wrong, one hint that says what to do next."""

from __future__ import annotations

TYPE_CHECKING = False  # see `coattn`
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class CoattnError(Exception):
    """Base of every error coattn raises on purpose.

    `str(error)` is the sentence; `error.hint` is what to do next, which tracebacks show below the sentence. The command
    line prints both and exits with 2.
    """

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class ConfigError(CoattnError):
    """An unknown key, a value of the wrong type or out of range."""


class UnknownNameError(ConfigError):
    """Parameters that `owner` does not have. instead: by name, what does the same."""

    def __init__(
        self, owner: str, names: Collection[str], known: Collection[str], instead: Mapping[str, str] | None = None
    ) -> None:
        from difflib import get_close_matches

        self.owner, self.names, self.known = owner, sorted(names), sorted(known)
        close = [found for name in self.names for found in get_close_matches(name, self.known, 1)]
        said = f"{owner[:1].upper()}{owner[1:]} has no parameter {', '.join(map(repr, self.names))}."
        hint = f"Did you mean {', '.join(close)}?" if close else f"It has: {', '.join(self.known)}."
        super().__init__(said, next((text for name, text in (instead or {}).items() if name in names), hint))


class MethodError(CoattnError):
    """A method row that does not exist or whose parts do not fit together."""


class BudgetError(CoattnError):
    """A memory budget that cannot hold what was asked of it; the sentence names the minimum. least: bytes that would be
    enough, where they are known."""

    def __init__(self, sentence: str, hint: str = "", least: int | None = None) -> None:
        super().__init__(sentence, hint)
        self.least = least


class ModelError(CoattnError):
    """A model that cannot be found, read or used."""


class UnsupportedError(CoattnError):
    """A model family, an option or a call that coattn refuses, by name and with the reason."""


class InputError(CoattnError):
    """A prompt, text or file that cannot be used."""


class WorkerError(CoattnError):
    """The CPU's part of a step failed or came too late. An engine tries a step of several requests again with new
    workers; a request that fails alone in a step gets this error."""


class BusyError(CoattnError):
    """A line that is full: as many requests wait as may. Later there will be room."""


class SessionBusyError(BusyError):
    """A session that is still answering: it takes one turn at a time."""


class TransferError(CoattnError):
    """A prompt that another process was to read: that process is gone, late, another model's, or does not want to."""


class DeadlineError(CoattnError):
    """A request that was not done by its deadline."""


class EngineError(CoattnError):
    """A step that failed for a reason of its own, or an engine that is closed."""


LONGEST_MESSAGE = 240
"""Characters of a foreign message that are worth repeating."""


def one_line(error: BaseException) -> str:
    """The message of a foreign error, on one line, of bearable length."""
    text = " ".join(str(error).split()).rstrip(".:")
    if len(text) > LONGEST_MESSAGE:
        text = text[:LONGEST_MESSAGE].rsplit(" ", 1)[0] + " ..."
    return f"{type(error).__name__} {text}" if isinstance(error, KeyError) else text or type(error).__name__
