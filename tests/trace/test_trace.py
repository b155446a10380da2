"""What a trace says of a step, and the files made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.run import coattn

from coattn.trace.chrome import chrome_trace, intervals
from coattn.trace.figure import timeline
from coattn.trace.step import Span, StepTrace

STEP = StepTrace(
    begin=1000,
    end=11_000,
    sequences=2,
    spans=(Span(0, 1500, 2000, 5000, 1600, 4800), Span(1, 6000, 9000, 8000, 6200, 7900)),
    hbm_bytes=10_000,
    pcie_bytes=100,
    dram_bytes=5_000,
)


def test_idle_is_waiting_with_nothing_else_to_do() -> None:
    assert [span.idle for span in STEP.spans] == [3000, 0]
    assert STEP.gpu_idle == pytest.approx(0.3)
    assert STEP.cpu_busy == pytest.approx((3200 + 1700) / 10_000)
    assert STEP.as_dict()["dram_gbps"] == pytest.approx(0.5)


def test_the_gpus_intervals_do_not_overlap_and_leave_out_its_waiting() -> None:
    gpu = [(start, end) for track, _, start, end in intervals(STEP) if track == "GPU"]
    assert gpu == [(1000, 2000), (5000, 9000), (9000, 11_000)]


def test_chrome_trace_and_picture(tmp_path: Path) -> None:
    trace = chrome_trace([STEP])
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 1 + 2 * 4 + 1
    assert min(event["ts"] for event in spans) == 0
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(10)
    timeline(STEP, "a title", tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    target = tmp_path / "t.json"
    done = coattn("trace", "--shapes", "tiny", "--context", "200", "--device", "cpu", "--out", str(target), "--json")
    result = json.loads(done.stdout)
    assert len(result["steps"]) == 4
    assert all(0 < step["cpu_busy"] < 1 and step["dram_bytes"] > 0 for step in result["steps"])
    assert json.loads(target.read_text())["traceEvents"]
    assert target.with_suffix(".png").exists()
