"""What goes from the front to a replica, and the words both use."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from coattn.serve.cluster.affinity import NOWHERE, Affinity

Message = MutableMapping[str, Any]
"""Of ASGI."""
REPLICA = "x-coattn-replica"
"""The header that says who answers; in a request, who should."""
HELD = "held"
"""In what a replica tells routers: keys that it has answered."""
PLAIN = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "client",
    "server",
)
"""What of a scope can travel."""


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
    """A scope without what only its own process understands."""
    found: dict[str, Any] = {name: scope[name] for name in PLAIN if name in scope}
    return found | {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]]}
