"""Texts to work on: files, standard input, and one that ships with Python."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from coattn.errors import InputError


class Text(NamedTuple):
    """A text and where it comes from."""

    name: str
    body: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body.encode()).hexdigest()

    def as_dict(self) -> dict[str, str]:
        """What a result says of it."""
        return {"name": self.name, "sha256": self.sha256}


def default_text() -> Text:
    """The English help topics that ship with Python, in alphabetical order: about 700 kB, on every machine."""
    from pydoc_data import topics

    return Text("python help topics", "\n\n".join(topics.topics[name] for name in sorted(topics.topics)))


def read_text(path: str | Path | None) -> Text:
    """A UTF-8 file as text; None is the default text. Raises InputError for a file that is not text."""
    if path is None:
        return default_text()
    return Text(Path(path).name, decode(read_bytes(Path(path)), str(path)))


def read_bytes(path: Path) -> bytes:
    """A file's bytes. Raises InputError when it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.", "Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.") from None


def decode(data: bytes, name: str) -> str:
    """Bytes as UTF-8 text. Raises InputError when they are not, or when they are empty."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{name} is not a text file (UTF-8).", "Convert it to plain text first.")
    if not text.strip():
        raise InputError(f"{name} is empty.", "Give a text with at least one word.")
    return text
