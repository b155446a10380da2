"""Ray's hook for choosing a replica. Its API is alpha in Ray 2.60; all that depends on it is here."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from coattn.serve.cluster.affinity import Candidate, rank
from coattn.serve.cluster.relay import Forwarded

MAX_KEYS = 1 << 16
"""Keys whose replica a router remembers."""


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that has its session or the beginning of its prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: OrderedDict[str, str] = OrderedDict()
        """The replica that last got a key, the most recently used key last."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in ranks. If all are full, Ray asks again after a pause."""
        request = _forwarded(pending_request)
        if request is None or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        if request.wanted in known and request.wanted not in request.avoid:
            return [[known[request.wanted]]]
        candidates = [
            Candidate(name, self.replica_queue_len_cache.get(each.replica_id) or 0, each.max_ongoing_requests)
            for name, each in known.items()
        ]
        ranks = rank(request.affinity, candidates, self._sent, request.avoid)
        return [[known[name] for name in names] for names in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ray calls this when a replica has taken a request."""
        request = _forwarded(pending_request)
        for key in () if request is None else request.affinity.keys:
            self._sent[key] = replica_id.unique_id
            self._sent.move_to_end(key)
        while len(self._sent) > MAX_KEYS:
            self._sent.popitem(last=False)


def _forwarded(pending: PendingRequest | None) -> Forwarded | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, Forwarded) else None
