"""What a front sends to a replica, and the words both use."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from coattn.serve.cluster.affinity import NOWHERE, Affinity

Message = MutableMapping[str, Any]
"""Of ASGI."""
REPLICA = "x-coattn-replica"
"""The header that names the replica: in an answer the one that gave it, in a request the one that shall answer."""


def taken(name: str) -> Message:
    """The first message of every answer: the replica of this name has the request."""
    return {"type": "coattn.taken", REPLICA: name}


@dataclass(frozen=True)
class Forwarded:
    """One HTTP request."""

    scope: dict[str, Any]
    body: bytes
    affinity: Affinity = NOWHERE
    avoid: tuple[str, ...] = ()
    """Replicas that have failed this request."""
    wanted: str = ""
    """The replica that the client names, if any."""


def plain(scope: Scope) -> dict[str, Any]:
    """A scope without the objects that only its own process understands."""
    kept = {name: value for name, value in scope.items() if isinstance(value, str | bytes | tuple)}
    return kept | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]]}
