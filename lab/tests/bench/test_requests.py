"""`bench requests`: streams from a seed, figures of a run on a tiny model, and what is refused."""

from __future__ import annotations

import pytest
import torch

from coattn.errors import ConfigError
from coattn_lab.bench import stream
from coattn_lab.bench.random_model import random_model
from coattn_lab.bench.requests import Setting, Track, floor_s, rows_of, spread, summary
from coattn_lab.bench.stream import Item

CPU = torch.device("cpu")


def test_the_same_seed_gives_the_same_stream() -> None:
    first, again, other = (stream.draw(40, "uniform:10:90", "lognormal:20:0.5", "poisson:4", s) for s in (3, 3, 4))
    assert first == again != other
    assert all(10 <= item.prompt_tokens <= 90 for item in first)
    assert len({item.new_tokens for item in first}) > 10
    times = [item.arrival_s for item in first]
    assert times == sorted(times)
    assert times[0] == 0
    assert 4 < times[-1] < 25
    assert [i.arrival_s for i in stream.draw(3, "fixed:5", "fixed:1", "every:0.5", 0)] == [0, 0.5, 1.0]
    assert {i.arrival_s for i in stream.draw(3, "fixed:5", "fixed:1", "burst", 0)} == {0.0}


@pytest.mark.parametrize(
    "text", ["", "uniform", "uniform:3", "fixed:x", "fixed:nan", "fixed:-1", "gauss:1:2", "fixed:1:2"]
)
def test_distributions_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stream.draw(2, text, "fixed:1", "burst", 0)
    assert "uniform:LOW:HIGH" in caught.value.hint
    with pytest.raises(ConfigError):
        stream.draw(2, "fixed:1", "fixed:1", f"x{text}", 0)


def test_what_is_summed_up() -> None:
    tracks = [
        Track(Item(0.0, 4, 3), 10.0, 10.5, [11.0, 11.1, 11.4], 11.4),
        Track(Item(1.0, 4, 1), 11.0, 12.0, [12.5], 12.5),
        Track(Item(1.0, 4, 1), 11.0, None, [], 11.5, error="too long"),
    ]
    found = summary(tracks, 10.0)
    assert found["failed"] == 1
    assert found["errors"] == ["too long"]
    assert found["tokens"] == 4
    assert found["total_s"] == pytest.approx(2.5)
    assert found["tokens_per_s"] == pytest.approx(1.6)
    assert found["ttft_median_s"] == pytest.approx(1.25)
    assert found["between_p99_s"] == pytest.approx(0.3)
    assert found["queue_max_s"] == pytest.approx(1.0)
    assert spread([])["p99_s"] is None
    assert spread([float(i) for i in range(1, 101)])["p99_s"] == 99.0


def test_a_stream_under_methods() -> None:
    model = random_model("tiny", CPU, torch.float32)
    items = [Item(0.0, 90, 5), Item(0.0, 30, 3), Item(0.05, 60, 4), Item(0.1, 10, 1)]
    setting = Setting(2, 100, None, None, {"chunk": 32})
    rows = list(rows_of(model, [("full", {}), ("cpu", {}), ("full", {"wrong": 1})], items, setting, 0))
    for row in rows[:2]:
        assert row["tokens"] == 13
        assert row["failed"] == 0
        for line, item in zip(row["timeline"], items, strict=True):
            assert line["new_tokens"] == item.new_tokens
            assert item.arrival_s <= line["started_s"] <= line["first_s"] <= line["ended_s"] <= row["total_s"] + 1e-6
    assert rows[0]["prefill_steps"] >= 3 + 1 + 2 + 1
    assert rows[1]["host_kv_peak"] > 0
    assert "refused" in rows[2]
    floor = floor_s(model, items, 2)
    assert floor["floor_s"] >= 0.1
    assert floor["prompts_s"] > 0


def test_picks_that_are_driven_change() -> None:
    """Under `scout` blocks change from step to step; rows that pick by nothing are not driven."""
    model = random_model("tiny", CPU, torch.float32)
    params = {"block": 8, "window_blocks": 1, "budget": 40, "recall_interval": 2}
    setting = Setting(2, 120, None, None, {"chunk": 32}, change=0.3)
    scout, full = rows_of(model, [("scout", params), ("full", {})], [Item(0.0, 100, 12)], setting, 0)
    assert (scout["driven"], full["driven"]) == (True, False)
    assert scout["failed"] == full["failed"] == 0
    assert scout["tokens"] == full["tokens"] == 12
