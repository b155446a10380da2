"""The application: `import_path: coattn.serve.cluster.app:build`."""

from __future__ import annotations

from typing import Any

from ray import serve

from coattn.serve.cluster.front import Front
from coattn.serve.cluster.options import Options, Scale
from coattn.serve.cluster.server import Replica

FRONT, SERVER = "Front", "Server"
STREAMS = 4096
"""Requests that a front may have at a time: it only passes on."""
FRONT_CPUS = 0.1


def build(given: dict[str, Any]) -> Any:
    """given: `args` of the file for `serve deploy`."""
    args = Options.read(given)
    args.check()
    scaling: dict[str, Any] = {"num_replicas": args.replicas}
    if isinstance(args.replicas, Scale):
        scale = args.replicas
        scaling = {
            "autoscaling_config": {
                "min_replicas": scale.min,
                "max_replicas": scale.max,
                "target_ongoing_requests": scale.target or args.max_batch,
            }
        }
    server = serve.deployment(Replica).options(
        name=SERVER,
        max_ongoing_requests=args.most,
        max_queued_requests=max(1, args.max_waiting),
        graceful_shutdown_timeout_s=args.drain,
        health_check_period_s=args.health,
        ray_actor_options={**args.resources, "runtime_env": {"env_vars": args.env}},
        request_router_config={
            "request_router_class": "coattn.serve.cluster.router.AffinityRouter",
            "request_routing_stats_period_s": args.tell,
        },
        **scaling,
    )
    front = serve.deployment(Front).options(
        name=FRONT,
        num_replicas=args.fronts,
        max_ongoing_requests=STREAMS,
        graceful_shutdown_timeout_s=args.drain,
        ray_actor_options={"num_cpus": FRONT_CPUS},
    )
    return front.bind(args, server.bind(args))
