"""A step as a Chrome trace: open it in `chrome://tracing` or in Perfetto."""

from __future__ import annotations

from typing import Any

from coattn.step.trace.step import StepTrace

TRACKS = ("step", "GPU", "CPU workers", "PCIe")


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
    found = []
    free = step.begin
    for name, stop, go_on in step.waits():
        found.append(("GPU", name, free, stop))
        free = max(free, go_on)
    found.append(("GPU", "rest" if found else "step", free, step.end))
    for span in step.spans:
        found += [
            ("CPU workers", f"layer {span.layer}", span.seen, span.done),
            ("PCIe", f"query {span.layer}", span.posted, span.seen),
            ("PCIe", f"answer {span.layer}", span.done, span.answered),
        ]
    found += [("PCIe", f"blocks of {each.name}", each.begin, each.end) for each in step.crossings]
    return found
