"""What the engine is doing, as JSON: `/v1/coattn/status` once, `/v1/coattn/live` as it changes.

Built on the event loop from numbers that the engine's thread leaves behind, so looking costs no step anything.
"""

from __future__ import annotations

import time
from typing import Any

from coattn._version import __version__
from coattn.engine.llm import LLM
from coattn.engine.request import Request
from coattn.serve.answer.head import fingerprint
from coattn.serve.context import Context
from coattn.step.trace.blocks import Seen, cells
from coattn.step.trace.step import StepTrace

Json = dict[str, Any]
WATCH = 5.0
"""Seconds in which the engine keeps looking at single steps for somebody who asked."""


def status(context: Context) -> Json:
    """What does not change from step to step, and `live`."""
    engine = context.engine
    llm = engine.llm
    found: Json = {
        "version": __version__,
        "model": context.names[0] or None,
        "started": int(context.started),
        "recoveries": engine.recoveries,
    }
    if llm is not None:
        row = llm.composed.describe()
        found |= {
            "system_fingerprint": fingerprint(llm),
            "method": row["method"],
            "exact": row["exact"],
            "params": {name: _plain(value) for name, value in row["params"].items()},
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "device": str(llm.model.device),
            **llm.devices.report(llm.ledger),
            "max_length": llm.max_length,
            "max_batch": llm.runner.slots,
            "max_waiting": llm.engine.inbox.max_waiting,
            "captured": llm.not_captured is None,
            "disk_cache": llm.store.describe_disk(),
        }
    return {**found, "live": live(context)}


def live(context: Context) -> Json:
    """Requests, tiers, counts and the last sampled decode step."""
    engine = context.engine
    engine.watched = time.monotonic() + WATCH
    found: Json = {"time": time.time(), "state": engine.condition, "reason": engine.reason or None}
    llm, sample = engine.llm, engine.sample
    if llm is None:
        return {**found, "tiers": {}, "counts": {}, "requests": [], "step": None}
    report, scheduler = llm.report(), llm.engine.scheduler
    tiers = {}
    for tier, capacity in scheduler.admission.capacity.items():
        free = None if sample is None else sample.free.get(tier)
        tiers[tier] = {
            "held_bytes": report[f"{tier}_kv_bytes"],
            "capacity_bytes": capacity,
            "used_bytes": None if capacity is None or free is None else capacity - free,
        }
    names = ("prefill_tokens", "new_tokens", "prefill_steps", "decode_steps", "failed_steps", "preemptions", "requests")
    requests = [*list(scheduler.running), *list(scheduler.waiting)]
    return {
        **found,
        "tiers": tiers,
        "counts": {name: report[name] for name in names},
        "requests": [_request(llm, engine.seen, each) for each in requests],
        "step": None if sample is None or sample.trace is None else _step(sample.trace),
    }


def _request(llm: LLM, seen: Seen | None, request: Request) -> Json:
    state = "waiting" if request.slot is None else "decoding" if request.output else "reading"
    return {
        "id": request.id,
        "state": state,
        "priority": request.priority,
        "age_s": round(time.perf_counter() - request.arrived, 3),
        "prompt_tokens": len(request.prompt),
        "stored_tokens": request.stored,
        "new_tokens": len(request.output),
        "limit_tokens": request.limit,
        "preemptions": request.preemptions,
        "kv_bytes": dict(llm.runner.runtime.bytes_for(request.stored)),
        "cells": _cells(llm, seen, request),
    }


def _cells(llm: LLM, seen: Seen | None, request: Request) -> Json | None:
    """None while nothing of the request is stored. The engine may be at work on the tables that are read here."""
    slot, tokens = request.slot, request.stored
    if slot is None or not tokens:
        return None
    try:
        return cells(llm.runner.runtime.groups[-1], seen, slot, tokens)
    except (IndexError, KeyError, RuntimeError):  # it has just left
        return None


def _step(trace: StepTrace) -> Json:
    """The timeline in milliseconds from the step's beginning."""

    def ms(at: int) -> float:
        return round(float(at - trace.begin) / 1e6, 4)

    return {
        "ms": round(trace.seconds * 1e3, 4),
        "sequences": trace.sequences,
        "weight_bytes": trace.weight_bytes,
        "bytes": {link: getattr(trace, f"{link}_bytes") for link in ("hbm", "pcie", "dram")},
        "attended": {tier: getattr(trace, f"attended_{tier}") for tier in ("gpu", "host")},
        "gpu_idle": round(trace.gpu_idle, 4),
        "cpu_busy": round(trace.cpu_busy, 4),
        "cpu": [{"layer": span.layer, "begin": ms(span.seen), "end": ms(span.done)} for span in trace.spans],
        "pcie": [{"name": each.name, "begin": ms(each.begin), "end": ms(each.end)} for each in trace.crossings],
        "waits": [{"name": name, "begin": ms(begin), "end": ms(end)} for name, begin, end in trace.waits()],
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
