"""What a server is told when it starts, and where its API keys come from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from coattn.errors import InputError
from coattn.serve.steady import Steady
from coattn.text import decode, read_bytes

KEY = "COATTN_API_KEY"
"""The environment variable that holds a key."""


@dataclass(frozen=True)
class Settings:
    """Limits and habits of a server. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    """API keys; none: everybody on this machine may ask."""
    names: tuple[str, ...] = ()
    """Names that the model answers to; the first is its id. None: the model's own name."""
    origins: tuple[str, ...] = ()
    """Web pages of these origins may ask."""
    max_choices: int = 64
    """Answers to one HTTP request: prompts times `n`."""
    max_body: int = 32 << 20
    max_stops: int = 16
    max_stop_length: int = 1000
    """Characters of one stop string."""
    max_grammar: int = 64 << 10
    """Characters of a JSON schema, a regular expression or a grammar."""
    body_timeout: float = 30.0
    """A body that has not arrived by then is refused."""
    request_timeout: float | None = None
    """A request that is not done by then fails. A request may ask for less."""
    keep_alive: float = 2.0
    """Between two comments on a stream that has nothing to tell."""
    drain: float = 30.0
    """After SIGTERM, running requests may take this long."""
    stall: float = 120.0
    """A step that takes longer is given up on: its requests get an error."""
    key_requests: int | None = None
    """Answers that a key may wait for at a time."""
    key_tokens: int | None = None
    """Tokens a minute that are computed for a key."""
    steady: Steady = field(default_factory=Steady)
    """What is done to chats so that calls of one agent begin alike."""


def read_keys(file: str | None) -> tuple[str, ...]:
    """Keys of a file, one per line, and of the environment. Empty lines and those that begin with # are left out."""
    found: list[str] = []
    if file is not None:
        raw = read_bytes(Path(file))
        lines = [line.strip() for line in decode(raw, file).splitlines()] if raw.strip() else []
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InputError(f"{file} holds no API key.", "Write one on each line.")
    if KEY in os.environ:
        own = os.environ[KEY].strip()
        if not own:
            raise InputError(f"{KEY} is empty.", "Set it to a key, or unset it.")
        found.append(own)
    return tuple(found)
