"""A step as files: a Chrome trace, which `chrome://tracing` and Perfetto open, and a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from coattn.step.trace.step import StepTrace

TRACKS = ("step", "GPU", "CPU workers", "PCIe")
ROWS = ("GPU", "PCIe", "CPU workers")
COLOURS = {"GPU": "#4477aa", "PCIe": "#aa3377", "CPU workers": "#228833"}


def chrome_trace(steps: list[StepTrace]) -> dict[str, Any]:
    """The trace file's content; times in microseconds from the first step's begin."""
    origin = steps[0].begin
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": name}} for i, name in enumerate(TRACKS)
    ]

    def add(track: str, name: str, start: int, end: int, **args: Any) -> None:
        times = {"ts": (start - origin) / 1e3, "dur": max(0, end - start) / 1e3}
        events.append({"ph": "X", "name": name, "pid": 1, "tid": TRACKS.index(track), "args": args, **times})

    for number, step in enumerate(steps):
        add("step", f"step {number}", step.begin, step.end, sequences=step.sequences)
        for track, name, start, end in intervals(step):
            add(track, name, start, end)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def intervals(step: StepTrace) -> list[tuple[str, str, int, int]]:
    """`(track, name, start, end)` of everything that is known of a step."""
    bars = []
    free = step.begin
    for name, stop, go_on in step.waits():
        bars.append(("GPU", name, free, stop))
        free = max(free, go_on)
    bars.append(("GPU", "rest" if bars else "step", free, step.end))
    for span in step.spans:
        bars += [
            ("CPU workers", f"layer {span.layer}", span.seen, span.done),
            ("PCIe", f"query {span.layer}", span.posted, span.seen),
            ("PCIe", f"answer {span.layer}", span.done, span.answered),
        ]
    bars += [("PCIe", f"blocks of {each.name}", each.begin, each.end) for each in step.crossings]
    return bars


def timeline(step: StepTrace, title: str, path: Path) -> None:
    """Writes who worked when: one row each for GPU, PCIe and CPU; gaps are waiting."""
    figure, axes = pyplot.subplots(figsize=(11, 2.8), layout="constrained")
    for y, track in enumerate(ROWS):
        bars = [
            ((start - step.begin) / 1e6, max(0, end - start) / 1e6)
            for own, _, start, end in intervals(step)
            if own == track
        ]
        axes.broken_barh(bars, (y - 0.35, 0.7), facecolors=COLOURS[track], edgecolors="white", linewidth=0.2)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.invert_yaxis()
    axes.set_xlim(0, (step.end - step.begin) / 1e6)
    axes.set_xlabel("ms")
    waits = f"GPU waits {step.gpu_idle:.0%} (for the CPU {step.cpu_wait:.0%}, for PCIe {step.pcie_wait:.0%})"
    axes.set_title(f"{title}\n{step.seconds * 1e3:.2f} ms, {waits}, CPU busy {step.cpu_busy:.0%}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
