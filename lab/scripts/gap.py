"""How long running answers wait for their next token over HTTP: by themselves, and while a long prompt is read.

    python lab/scripts/gap.py [--shapes qwen3-8b] [--methods full] [--long 100000] [--slowdowns 2.5,2]

Weights, tokens and the tokenizer's words are random. The client is a process of its own, with a stream for each answer.
A line for each method and slowdown (the time between tokens that the engine aims at while it reads, as a multiple of
that without reading; left out, the engine's own): the times between two tokens of one answer before and while the
prompt is read, the ratio of their 99th percentiles, and how long the prompt took. A prompt is read before, for its
kernels.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

SHORT = 512
"""Tokens of the prompts whose answers run."""


async def stream(port: int, ids: list[int], new: int, times: list[float]) -> None:
    """Notes when each token of a streamed completion comes."""
    body = json.dumps({"prompt": ids, "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
    try:
        said = await reader.readline()
        if b" 200 " not in said:
            raise SystemExit(f"a request failed: {said + await reader.read()!r}")
        while line := await reader.readline():
            if line.startswith(b"data: {") and b'"finish_reason":null' in line:
                times.append(time.perf_counter())
    finally:
        writer.close()


async def client(port: int, given: dict[str, Any]) -> None:
    """Prints the gaps before and while the long prompt is read, and how long it took."""
    times: list[list[float]] = [[] for _ in given["short"]]
    running = [
        asyncio.create_task(stream(port, ids, given["new"], own))
        for ids, own in zip(given["short"], times, strict=True)
    ]
    while min(map(len, times)) < 8:
        await asyncio.sleep(0.01)
    begun = time.perf_counter()
    await asyncio.sleep(given["before_s"])
    sent = time.perf_counter()
    first: list[float] = []
    await stream(port, given["long"], 2, first)
    if any(each.done() for each in running):
        raise SystemExit("an answer ended before the prompt was read: raise --new")
    for each in running:
        each.cancel()
    between = lambda low, high: gaps(times, low, high)  # noqa: E731
    print(json.dumps({"before": between(begun, sent), "during": between(sent, first[0]), "read_s": first[0] - sent}))


def gaps(times: Iterable[list[float]], low: float, high: float) -> list[float]:
    """Of all answers, those that end in this span."""
    return [b - a for own in times for a, b in pairwise(own) if low < b <= high]


def measured(port: int, given: dict[str, Any]) -> dict[str, Any]:
    """What `client` prints, as a process."""
    command = [sys.executable, __file__, "--client", str(port)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@click.command()
@click.option("--shapes", default="qwen3-8b")
@click.option("--methods", default="full")
@click.option("--long", "tokens", default=100_000)
@click.option("--answers", default=8)
@click.option("--new", default=8192, help="Most tokens of an answer.")
@click.option("--before", "before_s", default=2.0, help="Seconds of answers alone.")
@click.option("--slowdowns", default="", help="Instead of the engine's own, with commas.")
@click.option("--gpu-kv", default=None)
@click.option("--host-kv", default=None)
@click.option("--device", default="auto")
@click.option("--client", "port", type=int, hidden=True)
def main(shapes: str, methods: str, tokens: int, answers: int, slowdowns: str, port: int | None, **more: Any) -> None:
    """Runs all, prints a line for each."""
    if port is not None:
        asyncio.run(client(port, json.load(sys.stdin)))
        return

    # not for the client, which is to begin soon
    from http_against_llm import Served, words
    from second_token import write_sketch

    from coattn import LLM
    from coattn.engine import chunk_policy
    from coattn.hf.load import choose_device, choose_dtype
    from coattn.method.table import find_method
    from coattn_lab.bench.random_model import random_model
    from coattn_lab.bench.requests import prompts_of, spread
    from coattn_lab.bench.stream import Item

    where = choose_device(more["device"])
    model = random_model(shapes, where, choose_dtype("auto", where))
    vocabulary = int(model.config.vocab_size)
    room = {"max_batch": answers + 1, "max_length": max(tokens + 64, SHORT + more["new"])}
    room |= {tier: more[tier] for tier in ("gpu_kv", "host_kv")}
    with tempfile.TemporaryDirectory() as folder:
        for method in methods.split(","):
            own = {}
            if find_method(method).index == "sketch":
                own["sketch"] = f"{folder}/sketch"
                write_sketch(model, Path(own["sketch"]))
            llm = LLM((model, words(vocabulary)), method, reuse=False, progress=False, **room, **own)
            llm.warm_up()
            served = Served(llm)
            try:
                for turn, slowdown in enumerate((None, *map(float, filter(None, slowdowns.split(","))))):
                    ids = prompts_of([*[Item(0, SHORT, 1)] * answers, Item(0, tokens, 1)], vocabulary, turn)
                    given = {"short": ids[:-1], "long": ids[-1], "new": more["new"], "before_s": more["before_s"]}
                    if not turn:
                        measured(served.service.port, {**given, "before_s": 0.2})
                    if turn or not slowdowns:
                        chunk_policy.SLOWDOWN = slowdown or chunk_policy.SLOWDOWN
                        found = measured(served.service.port, given)
                        before, during = spread(found["before"]), spread(found["during"])
                        show(f"{method} at {chunk_policy.SLOWDOWN:g}", before, during, tokens, found["read_s"])
            finally:
                served.close()


def show(what: str, before: dict[str, Any], during: dict[str, Any], tokens: int, seconds: float) -> None:
    """A line."""
    rows = (
        f"{name} {' '.join(f'{1e3 * each:.1f}' for each in row.values())},"
        for name, row in (("before", before), ("during", during))
    )
    print(
        f"{what}: gaps in ms (median, p99, longest)",
        *rows,
        f"ratio of p99 {during['p99_s'] / before['p99_s']:.2f},",
        f"p99 over median before {during['p99_s'] / before['median_s']:.2f};",
        f"{tokens:,} tokens read in {seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
