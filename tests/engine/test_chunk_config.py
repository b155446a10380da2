"""What was asked for, and what the device makes of it."""

from __future__ import annotations

import pytest

from coattn.engine.chunk_policy import FIRST_CHUNK_TOKENS, MIN_CHUNK_TOKENS, ChunkConfig
from coattn.errors import ConfigError


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="Both chunk and target_ms"):
        ChunkConfig(100, 50)
    with pytest.raises(ConfigError, match="chunk is 0"):
        ChunkConfig(0)
    with pytest.raises(ConfigError, match="target_ms"):
        ChunkConfig(None, 0)


@pytest.mark.parametrize("layers", [None, 36])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_chunk_that_was_given_is_kept(on_gpu: bool, layers: int | None) -> None:
    for exact in (False, True):
        assert ChunkConfig(100).policy(exact, on_gpu, layers).fixed == 100


@pytest.mark.parametrize(
    ("on_gpu", "layers", "fixed", "most", "least"),
    [
        (False, None, 2048, 2048, MIN_CHUNK_TOKENS),
        (True, None, 2048, 8192, FIRST_CHUNK_TOKENS),
        (True, 36, 8192, 8192, MIN_CHUNK_TOKENS),
    ],
)
def test_what_the_device_makes_of_nothing(on_gpu: bool, layers: int | None, fixed: int, most: int, least: int) -> None:
    """An exact method follows the clock; what another forgets must not depend on it."""
    exact, lossy = ChunkConfig().policy(True, on_gpu, layers), ChunkConfig().policy(False, on_gpu, layers)
    assert (exact.fixed, lossy.fixed) == (None, fixed)
    for policy in (exact, lossy):
        assert (policy.most, policy.least, policy.layers) == (most, least, layers or 1)
        assert (policy.tile > 1) is on_gpu


def test_a_promise_may_need_small_chunks() -> None:
    policy = ChunkConfig(target_ms=20).policy(False, True, None)
    assert (policy.fixed, policy.target_s, policy.least) == (None, 0.02, MIN_CHUNK_TOKENS)
