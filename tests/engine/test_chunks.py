"""What was asked for, and what the device makes of it."""

from __future__ import annotations

import pytest

from coattn.engine.chunks import Chunks
from coattn.engine.pace import FIRST, LEAST
from coattn.errors import ConfigError


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="Both chunk and target_ms"):
        Chunks(100, 50)
    with pytest.raises(ConfigError, match="chunk is 0"):
        Chunks(0)
    with pytest.raises(ConfigError, match="target_ms"):
        Chunks(None, 0)


@pytest.mark.parametrize("layers", [None, 36])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_chunk_that_was_given_is_kept(on_gpu: bool, layers: int | None) -> None:
    for exact in (False, True):
        assert Chunks(100).pace(exact, on_gpu, layers).fixed == 100


@pytest.mark.parametrize(
    ("on_gpu", "layers", "fixed", "most", "least"),
    [(False, None, 2048, 2048, LEAST), (True, None, 2048, 8192, FIRST), (True, 36, 8192, 8192, LEAST)],
)
def test_what_the_device_makes_of_nothing(on_gpu: bool, layers: int | None, fixed: int, most: int, least: int) -> None:
    """An exact method follows the clock; what another forgets must not depend on it."""
    exact, lossy = Chunks().pace(True, on_gpu, layers), Chunks().pace(False, on_gpu, layers)
    assert (exact.fixed, lossy.fixed) == (None, fixed)
    for pace in (exact, lossy):
        assert (pace.most, pace.least, pace.layers) == (most, least, layers or 1)
        assert (pace.tile > 1) is on_gpu


def test_a_promise_may_need_small_chunks() -> None:
    pace = Chunks(target_ms=20).pace(False, True, None)
    assert (pace.fixed, pace.target_s, pace.least) == (None, 0.02, LEAST)
