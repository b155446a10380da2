"""Ray's hook for choosing a replica. Its API is alpha in Ray 2.60; all that depends on it is here."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from coattn.serve.cluster.forwarded import HELD, Forwarded
from coattn.serve.cluster.rank import Candidate, Memory, rank

MOST = 1 << 16
"""Keys that a router remembers."""


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that has its session or the beginning of its prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent = Memory(MOST)
        self._said: dict[str, tuple[object, frozenset[str]]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks; where all replicas of all ranks are full, this is asked again after a pause."""
        asked = _asked(pending_request)
        if asked is None or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        known = {each.replica_id.unique_id: each for each in candidate_replicas}
        if asked.wanted in known and asked.wanted not in asked.avoid:
            return [[known[asked.wanted]]]
        ranks = rank(
            asked.affinity, [self._candidate(each) for each in candidate_replicas], self._sent.places, asked.avoid
        )
        return [[known[name] for name in names] for names in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called when a replica has taken a request."""
        asked = _asked(pending_request)
        if asked is not None:
            self._sent.note(asked.affinity.keys, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called when replicas come, go, or say something new."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        self._said = {name: said for name, said in self._said.items() if name in names}

    def _candidate(self, replica: RunningReplica) -> Candidate:
        name: str = replica.replica_id.unique_id
        stats = replica.routing_stats
        before = self._said.get(name)
        if before is None or before[0] is not stats:
            before = self._said[name] = (stats, frozenset((stats or {}).get(HELD, ())))
        load = self.replica_queue_len_cache.get(replica.replica_id)
        return Candidate(name, load or 0, replica.max_ongoing_requests, before[1])


def _asked(pending: PendingRequest | None) -> Forwarded | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, Forwarded) else None
