"""The application: `import_path: coattn.serve.cluster.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve

from coattn.serve.cluster.front import Front
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.server import Replica

MAX_STREAMS = 4096
"""Requests that a front may have at a time: it only relays."""
FRONT_CPUS = 0.1
ROUTER = {"request_router_class": "coattn.serve.cluster.router.AffinityRouter"}


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
