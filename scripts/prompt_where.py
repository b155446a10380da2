"""Where the time of a burst of requests goes: kernels by kind, the GPU's gaps, and what the host does meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Span = tuple[float, float, str]
"""Beginning and end in milliseconds, and the kernel's name."""
KINDS: dict[str, tuple[str, ...]] = {
    "copies": ("memcpy", "memset"),
    "attention of prompts": ("sdpa", "flash", "fmha", "attend_prompt"),
    "attention of decode steps": ("_attend",),
    "products": ("nvjet", "gemm", "cutlass", "product", "_few", "_vector", "splitk", "cublas"),
}
OTHER = "other kernels"
SLOW = 0.02
"""Seconds of a call of the attention of prompts from which it must have compiled something."""


def kind_of(name: str) -> str:
    """What a kernel does, by its name."""
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), OTHER)


def covered(spans: Sequence[Span]) -> float:
    """Milliseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for first, last, _ in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def table(spans: Sequence[Span], wall_ms: float) -> dict[str, float]:
    """Milliseconds of each kind, each kernel by itself, and how long no kernel ran. Copies run beside kernels."""
    by: dict[str, float] = dict.fromkeys((*KINDS, OTHER), 0.0)
    for first, last, name in spans:
        by[kind_of(name)] += last - first
    busy = covered([span for span in spans if kind_of(span[2]) != "copies"])
    return {**by, "no kernel": wall_ms - busy, "wall": wall_ms}


def largest(spans: Sequence[Span], count: int) -> list[tuple[str, float, int]]:
    """Names of the kernels that took longest of the other kind, their milliseconds, and how many there were."""
    by: dict[str, list[float]] = defaultdict(list)
    for first, last, name in spans:
        if kind_of(name) == OTHER:
            by[name.replace("void ", "").replace("at::native::", "")[:60]].append(last - first)
    ordered = sorted(by.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, sum(each), len(each)) for name, each in ordered]


class Host:
    """What an engine's host does: calls that read or decode, and calls of attention that compile."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every engine's steps are timed inside this block."""
        from coattn.engine.engine import Engine
        from coattn.engine.work import Decode
        from coattn.ops.prompt import attend

        do, run = Engine._do, attend.best

        def timed(engine: Any, work: Any, inside: bool = False, **more: Any) -> None:
            begin = time.perf_counter()
            do(engine, work, inside, **more)
            kind = "read" if not isinstance(work, Decode) else "decode inside a read" if inside else "decode"
            self.seconds[kind].append(time.perf_counter() - begin)

        def chosen(shape: Any) -> Any:
            begin = time.perf_counter()
            found = run(shape)
            if time.perf_counter() - begin > SLOW:
                self.seconds["choosing a kernel"].append(time.perf_counter() - begin)
            return found

        engine: Any = Engine
        engine._do, attend.best = timed, chosen
        try:
            yield
        finally:
            engine._do, attend.best = do, run

    def rows(self) -> list[dict[str, Any]]:
        """Of each kind of call: how many, seconds, and the longest."""
        return [
            {"host": kind, "calls": len(each), "seconds": sum(each), "longest_s": max(each)}
            for kind, each in self.seconds.items()
        ]


def where(model: Any, method: str, items: list[Any], setting: Any, seed: int) -> dict[str, Any]:
    """The requests under a profiler that sees the GPU alone: kernels of captured steps, too."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from coattn.bench import requests
    from coattn.engine.params import SamplingParams

    prompts = requests.prompts_of(items, int(model.config.vocab_size), seed)
    host = Host()
    with requests.open_llm(model, method, {}, setting) as llm:
        llm.warm_up()
        llm.generate([prompts[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        with profile(activities=[ProfilerActivity.CUDA]) as traced, host.watching():
            begin = time.perf_counter()
            requests._play(llm, items, prompts, begin)
            torch.cuda.synchronize()
            wall = (time.perf_counter() - begin) * 1e3
    spans = [
        (event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6, event.name())
        for event in traced.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0
    ]
    return {
        "method": method,
        "requests": len(items),
        "prompt_tokens": sum(item.prompt_tokens for item in items),
        "total_s": wall / 1e3,
        "milliseconds": table(spans, wall),
        "largest": largest(spans, 10),
        "host": host.rows(),
    }


def lines(row: dict[str, Any]) -> Iterator[str]:
    """As a person reads it."""
    whole = row["milliseconds"]["wall"]
    for name, ms in row["milliseconds"].items():
        yield f"  {name:26} {ms:9.1f} ms {ms / whole:7.1%}"
    for name, ms, count in row["largest"]:
        yield f"    {ms:9.1f} ms {count:6d}  {name}"
    for each in row["host"]:
        took = f"{each['seconds']:.2f} s, longest {each['longest_s']:.3f} s"
        yield f"  host: {each['host']}: {each['calls']} calls, {took}"
