"""What a row says of the GPU's waiting, from stamps as a GPU leaves them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from lab.tests.run import coattn_lab

from coattn.parts.handover.mailbox import MailboxThread, Span
from coattn.parts.handover.manager import MailboxBridge
from coattn.step.trace.step import Crossing, Timing, on_host_clock
from coattn_lab.bench.decode import _time, layer_us, waiting

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


def test_what_is_pulled_is_stamped_by_layer() -> None:
    spec = SimpleNamespace(layers={3: None, 5: None}, device=torch.device("cpu"))
    cache, thread = SimpleNamespace(spec=spec), MailboxThread()
    asking, pulling = (MailboxBridge(cache, pulls, thread) for pulls in (False, True))  # type: ignore[arg-type]
    assert asking.fetches() == []
    assert asking.timestamp_slot(5, "pull") is None
    for who, time in (("gpu", 100), ("pull", 400)):
        stamp = pulling.timestamp_slot(5, who)
        assert stamp is not None
        stamp.fill_(time)
    assert pulling.fetches() == [("layer 3", 0, 0), ("layer 5", 100, 400)]
    assert on_host_clock(pulling.fetches(), last=500, begin=0, end=1500) == [Crossing("layer 5", 1100, 1400)]


@pytest.mark.gpu
@pytest.mark.alone
def test_who_waits_for_whom_on_a_gpu() -> None:
    few = ("--batch", "4", "--context", "32768", "--steps", "24", "--seconds", "2", "--json")
    done = coattn_lab("bench", "decode", "--shapes", "tiny", "--methods", "full,offload,cpu", *few)
    rows = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    assert all(row["idle_steps"] >= 3 for row in rows.values())
    assert rows["full"]["gpu_idle"] == 0
    assert rows["offload"]["idle_cpu"] == 0 < 0.3 < rows["offload"]["idle_pcie"] <= 1
    assert rows["cpu"]["idle_pcie"] == 0 < 0.3 < rows["cpu"]["idle_cpu"] <= 1
    assert rows["offload"]["gpu_idle"] == pytest.approx(rows["offload"]["idle_pcie"])
