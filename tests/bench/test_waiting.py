"""What a row says of the GPU's waiting, from stamps as a GPU leaves them."""

from __future__ import annotations

import pytest

from coattn.bench.decode import _time, layer_us, waiting
from coattn.trace.step import Crossing, Span, Timing

HANDED = Timing(0, 10_000, (Span(0, posted=1000, ready=2000, answered=6000, seen=1500, done=5500),), ())
PULLED = Timing(0, 10_000, (), (Crossing("layer 0", 200, 5000), Crossing("layer 1", 5200, 10_000)))


def test_the_mean_over_steps() -> None:
    busy = Timing(0, 10_000, (Span(0, 1000, 6000, 6000, 1500, 5500),), ())
    found = waiting([HANDED, busy])
    assert found == {"gpu_idle": pytest.approx(0.2), "idle_cpu": pytest.approx(0.2), "idle_pcie": 0, "idle_steps": 2}
    assert layer_us([HANDED, busy]) == {"gpu": 3.0, "cpu": 4.0, "wait": 2.0}


def test_a_pull_is_waiting_for_pcie() -> None:
    assert waiting([PULLED]) == {"gpu_idle": 0.96, "idle_cpu": 0, "idle_pcie": 0.96, "idle_steps": 1}
    assert layer_us([PULLED]) is None


def test_what_was_not_measured_is_not_zero() -> None:
    assert waiting([]) == {"gpu_idle": None, "idle_cpu": None, "idle_pcie": None, "idle_steps": 0}


def test_looks_are_taken_at_steps_that_count() -> None:
    done: list[str] = []
    taken = _time(lambda: done.append("step"), 6, 60.0, lambda: done.append("look"))
    assert len(taken) == 4
    assert done == ["step", "step", *["step", "look"] * 4]
