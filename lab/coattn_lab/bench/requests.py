"""A stream of requests under a method: who waits how long for what."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import CoattnError
from coattn.hf.experts import weights_read
from coattn.native import default_threads
from coattn_lab.bench.core_limits import stream_read_gbps
from coattn_lab.bench.drift import Drift, noise_for
from coattn_lab.bench.drive import drive_scores, picks_by_digests
from coattn_lab.bench.limits import hbm_gbps
from coattn_lab.bench.prefill import floor_s as prompt_floor_s
from coattn_lab.bench.scout import PERIOD
from coattn_lab.bench.stream import Item


@dataclass(frozen=True)
class Setting:
    """What every row of a run has in common."""

    max_batch: int
    max_length: int
    gpu_kv: int | None
    host_kv: int | None
    options: dict[str, Any]
    """More of `coattn.LLM`: chunk, target_ms."""
    change: float | None = None
    """Where picks by digests are driven: the share of blocks that is new in a step."""
    wrong: float = 0.05
    """Then: the share of scores that a prediction gets wrong."""


@dataclass(eq=False)
class Track:
    """When what happened to one request, in seconds of `time.perf_counter`."""

    item: Item
    arrived: float
    started: float | None = None
    tokens: list[float] | None = None
    ended: float | None = None
    preemptions: int = 0
    error: str | None = None


def prompts_of(items: Sequence[Item], vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (item.prompt_tokens,), generator=generator).tolist() for item in items]


def open_llm(model: Any, method: str, params: dict[str, Any], setting: Setting) -> LLM:
    """The engine of a row, over token ids."""
    return LLM(
        (model, None),
        method,
        gpu_kv=setting.gpu_kv,
        host_kv=setting.host_kv,
        max_batch=setting.max_batch,
        max_length=setting.max_length,
        reuse=False,  # a prompt that comes twice is read twice
        **setting.options,
        **params,
    )


def counted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What an engine did between two reports."""
    return {name: after[name] - before[name] for name in ("preemptions", "prefill_steps", "decode_steps", "new_tokens")}


def run_method(
    model: Any, method: str, params: dict[str, Any], items: list[Item], prompts: list[list[int]], setting: Setting
) -> dict[str, Any]:
    """One row. Raises CoattnError for a method or a request that cannot run at all."""
    with open_llm(model, method, params, setting) as llm:
        driven = setting.change is not None and _drive(llm, items, setting)
        llm.warm_up()
        # kernels are chosen and compiled on the first prompt: not what is measured
        llm.generate([prompts[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        before = llm.report()
        begin = time.perf_counter()
        tracks = play(llm, items, prompts, begin)
        counts = counted(before, llm.report())
        tiers = {f"{tier}_kv_peak": llm.ledger.peak[tier] for tier in llm.ledger.peak}
    return {"method": method, "params": params, "driven": driven, **summary(tracks, begin), **counts, **tiers}


def _drive(llm: LLM, items: list[Item], setting: Setting) -> bool:
    """Picks by digests change from step to step as stated, at the mean length of the requests. Whether any do."""
    assert setting.change is not None
    length = statistics.mean(item.prompt_tokens + item.new_tokens / 2 for item in items)
    params = llm.composed.params
    driven = [group for group in llm.runner.runtime.groups if picks_by_digests(group)]
    for group in driven:
        blocks = int(length) // group.cache.block
        picked = int(params.get("budget", 0)) // group.cache.block - int(params.get("window_blocks", 0))
        noise = noise_for(setting.change, blocks, picked) if 0 < picked < blocks else 0.0
        drive_scores(group, Drift(noise, PERIOD, setting.wrong))
    return bool(driven)


def play(llm: LLM, items: list[Item], prompts: list[list[int]], begin: float) -> list[Track]:
    """Submits each request when its time has come and steps in between."""
    tracks: list[Track] = []
    handles: list[Any] = []
    while len(handles) < len(items) or not all(handle.done for handle in handles):
        now = time.perf_counter() - begin
        while len(handles) < len(items) and items[len(handles)].arrival_s <= now:
            item, ids = items[len(handles)], prompts[len(handles)]
            track = Track(item, begin + item.arrival_s, tokens=[])
            sampling = SamplingParams(max_new_tokens=item.new_tokens, ignore_eos=True)
            handles.append(llm.submit(ids, sampling, notify=_noter(track)))
            tracks.append(track)
        if not llm.step() and len(handles) < len(items):
            time.sleep(max(0.0, begin + items[len(handles)].arrival_s - time.perf_counter()))
    for track, handle in zip(tracks, handles, strict=True):
        request, made = handle.request, handle.output()
        track.started, track.ended, track.preemptions = request.started, request.ended, request.preemptions
        track.error = None if made.error is None else str(made.error)
        if track.tokens and made.error is not None:
            track.tokens.pop()  # the end was told, too
        elif track.tokens:
            track.ended = track.tokens[-1]
    return tracks


def _noter(track: Track) -> Any:
    def note() -> None:
        assert track.tokens is not None
        track.tokens.append(time.perf_counter())

    return note


def summary(tracks: list[Track], begin: float) -> dict[str, Any]:
    """What a row says of its requests; failed ones count in `failed` alone."""
    good = [track for track in tracks if track.error is None and track.tokens]
    firsts = [track.tokens[0] - track.arrived for track in good if track.tokens]
    gaps = [b - a for t in good if t.tokens for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
    waits = [track.started - track.arrived for track in good if track.started is not None]
    made = sum(len(track.tokens) for track in good if track.tokens)
    total = max((track.ended or begin for track in tracks), default=begin) - begin
    return {
        "requests": len(tracks),
        "failed": len(tracks) - len(good),
        "errors": sorted({track.error for track in tracks if track.error}),
        "total_s": total,
        "tokens": made,
        "tokens_per_s": made / total if total else None,
        **{f"ttft_{name}": value for name, value in spread(firsts).items()},
        **{f"between_{name}": value for name, value in spread(gaps).items()},
        **{f"queue_{name}": value for name, value in spread(waits).items()},
        "timeline": [_line(track, begin) for track in tracks],
    }


def spread(seconds: list[float]) -> dict[str, float | None]:
    """Median, 99th percentile and largest, in seconds; None without any."""
    if not seconds:
        return dict.fromkeys(("median_s", "p99_s", "max_s"))
    ordered = sorted(seconds)
    rank = max(0, math.ceil(0.99 * len(ordered)) - 1)
    return {"median_s": statistics.median(ordered), "p99_s": ordered[rank], "max_s": ordered[-1]}


def _line(track: Track, begin: float) -> dict[str, Any]:
    marks = {"arrived_s": track.arrived, "started_s": track.started, "ended_s": track.ended}
    marks["first_s"] = track.tokens[0] if track.tokens else None
    return {
        "prompt_tokens": track.item.prompt_tokens,
        "new_tokens": len(track.tokens or ()),
        "preemptions": track.preemptions,
        **{name: None if mark is None else mark - begin for name, mark in marks.items()},
    }


def floor_s(model: Any, items: list[Item], max_batch: int) -> dict[str, float]:
    """The least time of a stream under any method: prompts by their FLOPs; every decode step reads the weights once.

    The keys and values that decoding reads are left out, since methods differ in them.
    """
    by_length: dict[int, float] = {}
    for item in items:
        if item.prompt_tokens not in by_length:
            by_length[item.prompt_tokens] = prompt_floor_s(model, item.prompt_tokens)
    prompts = sum(by_length[item.prompt_tokens] for item in items)
    gbps = hbm_gbps(model.device) if model.device.type == "cuda" else stream_read_gbps(default_threads(), 256 << 20)
    decoded = sum(item.new_tokens - 1 for item in items)
    steps = max(math.ceil(decoded / max_batch), max(item.new_tokens - 1 for item in items))
    decode = steps * weights_read(model).of(max_batch) / gbps / 1e9
    last = max(item.arrival_s for item in items)
    return {"prompts_s": prompts, "decode_s": decode, "floor_s": max(prompts + decode, last)}


def rows_of(
    model: Any, methods: Sequence[tuple[str, dict[str, Any]]], items: list[Item], setting: Setting, seed: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each method, `refused` where it cannot run."""
    prompts = prompts_of(items, int(model.config.vocab_size), seed)
    for method, params in methods:
        try:
            yield run_method(model, method, params, items, prompts, setting)
        except (CoattnError, torch.OutOfMemoryError) as error:
            yield {"method": method, "params": params, "refused": " ".join(str(error).split())[:300]}
