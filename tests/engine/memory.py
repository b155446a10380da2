"""Memories that are pretended, for what decides by bytes alone."""

from collections.abc import Mapping

from coattn.cache.ledger import Ledger
from coattn.types import Tier

GPU, HOST = 8, 4
"""Tokens per block in each tier of the pretended memory; a block is 100 bytes."""


class Blocks:
    """Two tiers of blocks. The GPU tier holds the newest tokens only, as an arena's does."""

    def __init__(self, gpu: int | None, host: int | None) -> None:
        self.limits: dict[Tier, int | None] = {"gpu": gpu, "host": host}
        self.ledger = Ledger(gpu, host)
        """Whose limits errors name."""
        self.held: dict[int, int] = {}

    def bytes_for(self, tokens: int) -> Mapping[Tier, int]:
        return {"gpu": 100 * -(-min(tokens, 32) // GPU), "host": 100 * (tokens // HOST)}

    def free_bytes(self) -> Mapping[Tier, int | None]:
        used = {tier: sum(self.bytes_for(n)[tier] for n in self.held.values()) for tier in self.limits}
        return {tier: None if limit is None else limit - used[tier] for tier, limit in self.limits.items()}

    def fullest(self, _tier: Tier) -> tuple[str, float]:
        return "", 1.0

    def store(self, slot: int, history: int, tokens: int) -> None:
        assert self.held.get(slot, 0) == history
        self.held[slot] = history + tokens
        assert all(room is None or room >= 0 for room in self.free_bytes().values()), "above the budget"

    def truncate(self, slot: int, length: int, keep: int) -> None:
        assert keep == 0
        assert self.held.pop(slot, 0) == length


class Boundless:
    """No tier has a limit."""

    def bytes_for(self, _tokens: int) -> Mapping[Tier, int]:
        return {}

    def free_bytes(self) -> Mapping[Tier, int | None]:
        return {}

    def truncate(self, slot: int, length: int, keep: int) -> None:
        pass
