"""Random operations on an engine whose memory is short, briefly; `python -m tests.engine.player` does it at length."""

from pathlib import Path

import pytest
from tests.engine.player import BUDGETS, Player

OPERATIONS = {"full": 100, "cpu": 100, "scout": 60, "hgca": 90}
MOST = 600
"""hgca chooses beside the steps, so what is finished after so many operations differs from run to run."""


@pytest.mark.parametrize("method", BUDGETS)
def test_random_operations(method: str, tmp_path: Path) -> None:
    player = Player(method, tmp_path, seed=5)
    try:
        player.play(OPERATIONS[method])
        while player.counts["hits"] <= 5 and player.done < MOST:
            player.play(30)
        assert player.counts["hits"] > 5
        assert player.counts["misses"] > 2
        report = player.llm.report()
        if player.exact:
            assert report["prefix_evicted"] > 5
            assert report["disk"]["written"] > 5
            assert report["disk"]["read_tokens"] > 0
    finally:
        player.close()
