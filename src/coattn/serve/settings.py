"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


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
