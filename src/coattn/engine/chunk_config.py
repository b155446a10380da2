"""How much of prompts a step reads: what was asked for, and what the device makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from coattn.engine.chunk_policy import FIRST_CHUNK_TOKENS, ChunkPolicy
from coattn.errors import ConfigError
from coattn.kernels.prompt.kernels import TILES
from coattn.part import check_count, check_number

DEFAULT_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 2048, 8192
"""Prompt tokens of a step where nothing else decides; on a GPU, where larger steps are faster, when nobody decodes."""


@dataclass(frozen=True)
class ChunkConfig:
    """Tokens of prompts in one step, or the time between two tokens that holds while prompts are read; or neither."""

    chunk: int | None = None
    target_ms: float | None = None

    def __post_init__(self) -> None:
        if self.target_ms is not None:
            check_number("target_ms", self.target_ms, 0, above=True)
            if self.chunk is not None:
                raise ConfigError("Both chunk and target_ms are given.", "Leave one out.")
        if self.chunk is not None:
            check_count("chunk", self.chunk, 1)

    def policy(self, exact: bool, on_gpu: bool, layers: int | None) -> ChunkPolicy:
        """Who decides how much is read at a time.

        layers: how many there are, where decode steps are captured and run between them: a step that reads is not, and
            its launches take longer than many decode steps.
        """
        policy = self._asked(exact)
        policy.most = GPU_CHUNK_TOKENS if on_gpu else DEFAULT_CHUNK_TOKENS
        policy.tile = TILES[-1] if on_gpu else 1
        if layers is not None:
            policy.layers = layers
            if self.chunk is None and policy.fixed is not None:
                policy.fixed = GPU_CHUNK_TOKENS
        elif on_gpu and self.target_ms is None:
            # fewer tokens save little time next to the launches of a step that is not captured
            policy.least = FIRST_CHUNK_TOKENS
        return policy

    def _asked(self, exact: bool) -> ChunkPolicy:
        if self.target_ms is not None:
            return ChunkPolicy(None, self.target_ms / 1e3)
        # what others forget of a prompt may depend on where it is cut, which should not depend on a clock
        return ChunkPolicy(DEFAULT_CHUNK_TOKENS if self.chunk is None and not exact else self.chunk)
