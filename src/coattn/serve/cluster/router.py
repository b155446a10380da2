"""Ray's hook for choosing a replica. Its API is alpha in Ray 2.60; all that depends on it is here."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from coattn.serve.cluster.affinity import rank
from coattn.serve.cluster.relay import Forwarded


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that its key names, and to the next one if that is full."""

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
