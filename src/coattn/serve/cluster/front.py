"""Takes HTTP from Ray's proxies and relays it to replicas. It has no model and runs on any machine."""

from __future__ import annotations

from typing import Any

from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coattn.serve.cluster.forwarded import Forwarded, Message
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.relay import FullError, LostError, Relay
from coattn.serve.gate import Gate, local_hosts
from coattn.serve.keys import read_keys

LOST = (
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
    ObjectLostError,
    ActorUnschedulableError,
    ReplicaUnavailableError,
)


class RayStream:
    """A replica's answer, with Ray's errors by our names."""

    def __init__(self, handle: Any, request: Forwarded) -> None:
        self._parts = handle.answer.remote(request)

    async def __anext__(self) -> list[Message]:
        try:
            part: list[Message] = await self._parts.__anext__()
            return part
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise FullError from error
        except LOST as error:
            if isinstance(error, RayTaskError):  # the replica lives and reports the death of another process
                raise
            raise LostError from error

    def cancel(self) -> None:
        self._parts.cancel()


class Front:
    """The ingress: keys are checked and bodies are read here, so that a request can be sent twice."""

    def __init__(self, options: Options, replicas: Any) -> None:
        settings = options.settings(read_keys(options.api_key_file))
        handle = replicas.options(stream=True)
        relay = Relay(settings, lambda request: RayStream(handle, request), options.retries, options.line)
        self.gate = Gate(relay, settings.keys, local_hosts(settings.host))

    async def __call__(self, request: Request) -> Response:
        return _GateResponse(self.gate)


class _GateResponse(Response):
    """A response that an ASGI app writes."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)
