"""The application: `import_path: coattn.serve.cluster.app:build`. Fronts take HTTP and relay it to replicas."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from coattn.serve.cluster.affinity import rank
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.relay import Forwarded, LostError, Relay, Stream
from coattn.serve.cluster.server import Server
from coattn.serve.errors import ApiError
from coattn.serve.gate import Gate, local_hosts
from coattn.serve.settings import read_keys

MAX_STREAMS = 4096
"""Requests that a front may have at a time: it only relays."""
FRONT_CPUS = 0.1
ROUTER = {"request_router_class": "coattn.serve.cluster.app.AffinityRouter"}


def build(given: dict[str, Any]) -> Any:
    """given: `args` of the file for `serve deploy`."""
    args = Options.read(given)
    replicas = serve.deployment(Replica).options(name="Server", request_router_config=ROUTER, **args.deployment())
    front = serve.deployment(Front).options(
        name="Front",
        num_replicas=args.fronts,
        max_ongoing_requests=MAX_STREAMS,
        graceful_shutdown_timeout_s=args.drain,
        ray_actor_options={"num_cpus": FRONT_CPUS},
    )
    return front.bind(args, replicas.bind(args))


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that its key names, and to the next one if that is full.

    The API of routers is alpha in Ray 2.60.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in ranks. If all are full, Ray asks again after a pause."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is None or not isinstance(request, Forwarded):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        names = rank(request.key or pending_request.metadata.internal_request_id, known)
        names.sort(key=lambda name: (name == request.avoid, name != request.wanted))
        return [[known[name]] for name in names]


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
        self._replicas = replicas.options(stream=True)
        self.gate = Gate(request_response(Relay(settings, self._ask)), settings.keys, local_hosts(settings.host))

    async def __call__(self, request: Request) -> Response:
        return _GateResponse(self.gate)

    async def _ask(self, request: Forwarded) -> Stream:
        """A replica's answer, with Ray's errors by our names."""
        parts = self._replicas.answer.remote(request)
        try:
            async for messages in parts:
                for message in messages:
                    yield message
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise ApiError(503, "Too many requests wait for a replica.", code="queue_full") from error
        except RayTaskError:  # the replica lives and reports an error of its own
            raise
        except (RayError, ReplicaUnavailableError) as error:
            raise LostError from error
        finally:
            parts.cancel()


class _GateResponse(Response):
    """A response that an ASGI app writes."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)
