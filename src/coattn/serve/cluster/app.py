"""The application: `import_path: coattn.serve.cluster.app:build`. Fronts take HTTP and relay it to replicas."""

from __future__ import annotations

from typing import Any

from ray import serve
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

from coattn.serve.cluster.options import Options
from coattn.serve.cluster.relay import Forwarded, FullError, LostError, Message, Relay
from coattn.serve.cluster.server import Server
from coattn.serve.gate import Gate, local_hosts
from coattn.serve.keys import read_keys

MAX_STREAMS = 4096
"""Requests that a front may have at a time: it only relays."""
FRONT_CPUS = 0.1
ROUTER = {"request_router_class": "coattn.serve.cluster.router.AffinityRouter"}
LOST = (
    RayActorError,
    NodeDiedError,
    WorkerCrashedError,
    ObjectLostError,
    ActorUnschedulableError,
    ReplicaUnavailableError,
)


def build(given: dict[str, Any]) -> Any:
    """given: `args` of the file for `serve deploy`."""
    args = Options.read(given)
    args.check()
    replicas = serve.deployment(Replica).options(name="Server", request_router_config=ROUTER, **args.deployment())
    front = serve.deployment(Front).options(
        name="Front",
        num_replicas=args.fronts,
        max_ongoing_requests=MAX_STREAMS,
        graceful_shutdown_timeout_s=args.drain,
        ray_actor_options={"num_cpus": FRONT_CPUS},
    )
    return front.bind(args, replicas.bind(args))


class Replica(Server):
    """A server as Ray makes and ends it: `__del__` comes after its requests, or after their time to drain."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, serve.get_replica_context().replica_id.unique_id)

    async def __del__(self) -> None:
        await self.close()


class Front:
    """The ingress: keys are checked and bodies are read here, so that a request can be sent twice. It has no model."""

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


class RayStream:
    """A replica's answer, with Ray's errors by our names."""

    def __init__(self, handle: Any, request: Forwarded) -> None:
        self._parts = handle.answer.remote(request)
        self.cancel = self._parts.cancel

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
