"""What a trace says of a step, and the files made of it."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.folders import save_tiny
from tests.cli.run import coattn
from tests.engine.small import greedy, llm, prompt

from coattn.parts.handover.mailbox import Span
from coattn.step.trace.files import chrome_trace, intervals, timeline
from coattn.step.trace.step import Crossing, StepTrace, covered, on_host_clock
from coattn.types import Step

STEP = StepTrace(
    begin=1000,
    end=11_000,
    sequences=2,
    spans=(Span(0, 1500, 2000, 5000, 1600, 4800), Span(1, 6000, 9000, 8000, 6200, 7900)),
    crossings=(),
    weight_bytes=4_000,
    hbm_bytes=10_000,
    pcie_bytes=100,
    dram_bytes=5_000,
)


def test_idle_is_waiting_with_nothing_else_to_do() -> None:
    assert [span.idle for span in STEP.spans] == [3000, 0]
    assert STEP.gpu_idle == pytest.approx(0.3)
    assert STEP.cpu_busy == pytest.approx((3200 + 1700) / 10_000)
    assert STEP.as_dict()["dram_gbps"] == pytest.approx(0.5)


def test_waiting_for_pcie_is_waiting() -> None:
    step = replace(STEP, spans=(), crossings=(Crossing("layer 0", 1500, 4500), Crossing("layer 1", 5000, 10_800)))
    assert (step.cpu_wait, step.pcie_wait, step.gpu_idle) == (0, pytest.approx(0.88), pytest.approx(0.88))
    both = replace(STEP, crossings=(Crossing("layer 0", 4000, 6000), Crossing("the recall", 10_000, 11_000)))
    assert both.cpu_wait + both.pcie_wait == pytest.approx(0.3 + 0.3)
    assert both.gpu_idle == pytest.approx(0.5)  # what overlaps counts once


@pytest.mark.parametrize(
    ("times", "total"),
    [([], 0), ([(5, 5)], 0), ([(9, 3)], 0), ([(0, 10), (2, 3), (8, 12)], 12), ([(20, 30), (0, 10)], 20)],
)
def test_overlapping_times_count_once(times: list[tuple[int, int]], total: int) -> None:
    assert covered(times) == total


def test_times_of_the_gpu_are_set_by_the_end_of_the_step() -> None:
    ahead = -1_000_000
    stamps = [
        ("layer 0", 1500 - ahead, 4500 - ahead),
        ("stale", 100 - ahead, 900 - ahead),
        ("never", 0, 0),
        ("half", 4800 - ahead, 0),
        ("from before", 500 - ahead, 1200 - ahead),
    ]
    found = on_host_clock(stamps, last=11_000 - ahead, begin=1000, end=11_000)
    assert found == [Crossing("layer 0", 1500, 4500), Crossing("from before", 1000, 1200)]


def test_a_crossing_is_seen_in_the_pictures(tmp_path: Path) -> None:
    step = replace(STEP, spans=(), crossings=(Crossing("layer 0", 2000, 9000),))
    assert intervals(step) == [
        ("GPU", "layer 0", 1000, 2000),
        ("GPU", "rest", 9000, 11_000),
        ("PCIe", "blocks of layer 0", 2000, 9000),
    ]


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
    folder, target = str(save_tiny("llama", tmp_path / "model")), tmp_path / "t.json"
    done = coattn("trace", "--model", folder, "--context", "200", "--device", "cpu", "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["steps"]) == 4
    assert all(0 < step["cpu_busy"] < 1 and step["dram_bytes"] > 0 for step in result["steps"])
    assert json.loads(target.read_text())["traceEvents"]
    assert target.with_suffix(".png").exists()


@pytest.mark.parametrize("method", ["cpu", "scout"])
def test_each_part_reports_once_for_a_trace(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may copy from the GPU, layer by layer."""
    asked: Counter[int] = Counter()

    def report(said: Callable[[Step], dict[str, Any]], number: int, step: Step) -> dict[str, Any]:
        asked[number] += 1
        return said(step)

    with llm(method) as engine:
        engine.generate(prompt(40), greedy(4, ignore_eos=True))
        for group in engine.runner.runtime.groups:
            for part in group.all():
                monkeypatch.setattr(part, "report", partial(report, part.report, id(part)))
        trace = engine.trace()
        assert trace.attended_gpu + trace.attended_host > 0
        monkeypatch.undo()
    assert set(asked.values()) == {1}
