"""Which transport an address asks for."""

from __future__ import annotations

from coattn.errors import UnsupportedError
from coattn.transfer.transport import Source, Target


def target(kind: str) -> Target:
    """By the kind of an address. Raises UnsupportedError if it cannot be used here."""
    return _kinds(kind)[0]()


def source(kind: str) -> Source:
    """By the kind of an address. Raises UnsupportedError if it cannot be used here."""
    return _kinds(kind)[1]()


def _kinds(kind: str) -> tuple[type[Target], type[Source]]:
    if kind == "tcp":
        return Target, Source
    if kind == "shm":
        from coattn.transfer.shm import ShmSource, ShmTarget

        return ShmTarget, ShmSource
    if kind == "nixl":
        from coattn.transfer.nixl import NixlSource, NixlTarget

        return NixlTarget, NixlSource
    raise UnsupportedError(f"There is no transport {kind!r}.", "Use tcp, shm or nixl.")
