"""The same stream of requests over HTTP: a server in this process, its clients in another."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import CoattnError, EngineError
from coattn_lab.bench.requests import Setting, Track, counted, open_llm, summary
from coattn_lab.bench.stream import Item

CLIENT = Path(__file__).with_name("http_client.py")


def ask(
    url: str, items: list[Item], prompts: list[list[int]], key: str | None = None, model: str | None = None
) -> list[dict[str, Any]]:
    """What came back for each request: `tokens` (seconds since the beginning), `coattn`, `error`."""
    lines = [
        {"arrival_s": item.arrival_s, "new_tokens": item.new_tokens, "prompt": ids}
        for item, ids in zip(items, prompts, strict=True)
    ]
    given = json.dumps({"items": lines, "key": key, "model": model})
    done = subprocess.run([sys.executable, str(CLIENT), url], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise EngineError(f"The clients failed: {said[0]}.", "Is the server running?")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@contextmanager
def serving(open_engine: Any) -> Iterator[tuple[str, LLM]]:
    """A server on a free port of this machine, on a thread of its own -> its address, and its engine."""
    from coattn.serve.lifecycle import Service
    from coattn.serve.settings import Settings

    failed: list[BaseException] = []
    service = Service(Settings(port=0, names=("bench",), drain=5), open_engine)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await service.run(signals=False)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=main, name="coattn-bench-server", daemon=True)
    thread.start()
    while service.engine.state == "loading" and thread.is_alive():
        time.sleep(0.02)
    try:
        if service.engine.llm is None:
            thread.join(30)
            raise failed[0] if failed else EngineError("The server did not start.", "Its log says more.")
        yield f"http://127.0.0.1:{service.port}", service.engine.llm
    finally:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(service.stop)
            thread.join(30)


def run_served(
    model: Any, method: str, params: dict[str, Any], items: list[Item], prompts: list[list[int]], setting: Setting
) -> dict[str, Any]:
    """One row, over HTTP. Raises CoattnError for a method that cannot run at all."""

    def open_engine() -> LLM:
        llm = open_llm(model, method, params, setting)
        try:
            llm.warm_up()
            llm.generate([prompts[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        except CoattnError:
            llm.close()
            raise
        return llm

    with serving(open_engine) as (url, llm):
        before = llm.report()
        answers = ask(url, items, prompts)
        counts = counted(before, llm.report())
        tiers = {f"{tier}_kv_peak": llm.ledger.peak[tier] for tier in llm.ledger.peak}
    tracks = [Track(item, item.arrival_s, tokens=[]) for item in items]
    fill(tracks, answers)
    return {"method": method, "params": params, "over": "http", **summary(tracks, 0.0), **counts, **tiers}


def run_url(url: str, key: str | None, items: list[Item], prompts: list[list[int]]) -> dict[str, Any]:
    """A row of a server that runs already, whatever it is."""
    tracks = [Track(item, item.arrival_s, tokens=[]) for item in items]
    fill(tracks, ask(url, items, prompts, key))
    return {"method": url, "params": {}, "over": "http", **summary(tracks, 0.0), "preemptions": None}


def fill(tracks: list[Track], answers: list[dict[str, Any]]) -> None:
    """Puts what the clients saw into the tracks."""
    for track, answer in zip(tracks, answers, strict=True):
        track.tokens, track.error = answer["tokens"], answer["error"]
        track.ended = track.tokens[-1] if track.tokens else None
        own = answer["coattn"].get("choices", [{}])[0]
        waited = own.get("timings", {}).get("queue_ms")
        track.started = None if waited is None else track.arrived + waited / 1e3
        track.preemptions = own.get("preemptions", 0)
