"""Loads on a running server: `serve_load.py forms URL`, `serve_load.py crowd URL`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

WORDS = ["the", "tall", "tree", "has", "seen", "seven", "stars", "fall", "into", "a", "quiet", "river", "at", "night"]
KINDS = 40
"""Different requests of a crowd."""
GROWTH_BYTES = 16 << 20
"""That a server may grow by in the second half of a crowd."""
PLACES = ["Paris", "Oslo", "Lima", "Cairo"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": PLACES},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "hot": {"type": "boolean"},
    },
    "required": ["city", "days", "tags", "hot"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "note", "parameters": {
        "type": "object", "properties": {"text": {"type": "string", "maxLength": 40}}, "required": ["text"],
    }}},
]  # fmt: skip


def valid(given: Any) -> bool:
    """Whether an object meets SCHEMA, by hand."""
    return (
        isinstance(given, dict)
        and set(given) == set(SCHEMA["properties"])  # type: ignore[arg-type]
        and given["city"] in PLACES
        and type(given["days"]) is int
        and 1 <= given["days"] <= 14
        and isinstance(given["tags"], list)
        and 1 <= len(given["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 12 for tag in given["tags"])
        and isinstance(given["hot"], bool)
    )


def note(given: Any) -> bool:
    """Likewise for the other tool."""
    return isinstance(given, dict) and set(given) == {"text"} and isinstance(given["text"], str)


def calls_valid(calls: list[dict[str, Any]]) -> bool:
    """Whether all of these are calls that there may be."""
    checks = {"weather": valid, "note": note}
    functions = [each["function"] for each in calls]
    return bool(calls) and all(checks[each["name"]](json.loads(each["arguments"])) for each in functions)


async def forms(client: httpx.AsyncClient, count: int, at_once: int) -> None:
    """Half of the requests must call a tool, the others must meet a schema; temperature 1, another seed each."""
    gate = asyncio.Semaphore(at_once)

    async def one(i: int) -> bool:
        said = [{"role": "user", "content": f"Question {i}: how is the weather in {PLACES[i % 4]} this week?"}]
        body: dict[str, Any] = {"messages": said, "seed": i, "temperature": 1, "max_completion_tokens": 300}
        if i % 2:
            body |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        else:
            form = {"name": "weather", "strict": True, "schema": SCHEMA}
            body |= {"response_format": {"type": "json_schema", "json_schema": form}}
        async with gate:
            got = await client.post("/v1/chat/completions", json=body)
        got.raise_for_status()
        message = got.json()["choices"][0]["message"]
        good = calls_valid(message["tool_calls"]) if i % 2 else valid(json.loads(message["content"]))
        if not good:
            print("not valid:", json.dumps(message))
        return good

    begin = time.perf_counter()
    good = sum(await asyncio.gather(*map(one, range(count))))
    print(f"{good} of {count} answers are valid; {time.perf_counter() - begin:.1f} s")
    assert good == count


@dataclass(frozen=True)
class Ask:
    """A request that has one right answer."""

    path: str
    body: dict[str, Any]


def drawn(luck: random.Random) -> Ask:
    """Of any length up to some hundred words; a text, tools or a schema; greedy, or drawn with a seed."""
    words = [luck.choice(WORDS) for _ in range(int(2 ** luck.uniform(1, 9)))]
    body: dict[str, Any] = {"temperature": luck.choice((0, 0, 1)), "seed": luck.randrange(1 << 30)}
    kind = luck.choice(("text", "text", "tools", "schema"))
    if kind == "text":
        return Ask("/v1/completions", {**body, "prompt": " ".join(words), "max_tokens": luck.choice((1, 8, 32, 64))})
    body |= {"messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 64}
    if kind == "tools":
        return Ask("/v1/chat/completions", {**body, "tools": TOOLS, "tool_choice": luck.choice(("auto", "required"))})
    form = {"name": "weather", "strict": True, "schema": SCHEMA}
    return Ask("/v1/chat/completions", {**body, "response_format": {"type": "json_schema", "json_schema": form}})


async def crowd(client: httpx.AsyncClient, count: int, at_once: int, seed: int, pid: int | None) -> None:
    """Half stream, a third leave in the middle. Whoever stays gets what the same request gets alone."""
    luck = random.Random(seed)
    asks = [drawn(luck) for _ in range(KINDS)]
    before = await tiers(client)  # of an idle server: what an answer took is given back a moment after it
    begin = time.perf_counter()
    alone = [await answer(client, ask, False) for ask in asks]
    longest = (time.perf_counter() - begin) / KINDS * at_once
    gate, counts = asyncio.Semaphore(at_once), {"answered": 0, "left": 0, "wrong": 0}
    memory: list[int] = []

    async def one(i: int) -> None:
        luck = random.Random(seed * 1_000_003 + i)
        which, leaves = luck.randrange(KINDS), luck.random() < 1 / 3
        async with gate:
            if i * 10 // count != (i - 1) * 10 // count:
                memory.append(resident(pid))
            try:
                async with asyncio.timeout(luck.random() ** 2 * longest / 2 if leaves else None):
                    made = await answer(client, asks[which], luck.random() < 0.5)
            except TimeoutError:
                counts["left"] += 1
                return
        counts["answered" if made == alone[which] else "wrong"] += 1
        if made != alone[which]:
            print(f"request {i} is wrong:", asks[which], "alone:", alone[which], "here:", made, sep="\n  ")

    begin = time.perf_counter()
    await asyncio.gather(*map(one, range(count)))
    took = time.perf_counter() - begin
    for _ in range(100):
        after = await tiers(client)
        if after == before:
            break
        await asyncio.sleep(0.2)
    again = [await answer(client, ask, False) for ask in asks]
    memory.append(resident(pid))
    print(f"seed {seed}: {counts} of {count}, {at_once} at a time, in {took:.1f} s")
    print(f"requests there, failed steps, failed requests, bytes per tier: {before} before, {after} after")
    print("MiB of the server after each tenth:", *(each >> 20 for each in memory))
    assert sum(counts.values()) == count
    assert counts["wrong"] == 0
    assert again == alone
    assert after == before
    assert memory[-1] - memory[5] < GROWTH_BYTES, "the server grows"


def resident(pid: int | None) -> int:
    """Bytes of memory that a process of this machine has."""
    return 0 if pid is None else int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def answer(client: httpx.AsyncClient, ask: Ask, streams: bool) -> list[Any]:
    """Its text, its calls without their ids, and why it ended; of a stream, which must end as one."""
    if not streams:
        got = await client.post(ask.path, json=ask.body)
        assert got.status_code == 200, got.text
        choice = got.json()["choices"][0]
        message = choice.get("message", choice)
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        said = message.get("text") or message.get("content") or ""
        return [said, [[each["name"], each["arguments"]] for each in calls], choice["finish_reason"]]
    text, calls, reason, last = "", [], None, ""
    async with client.stream("POST", ask.path, json={**ask.body, "stream": True}) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            last = line or last
            for choice in json.loads(line[6:]).get("choices", ()) if line.startswith("data: {") else ():
                delta, reason = choice.get("delta", choice), choice["finish_reason"] or reason
                text += delta.get("text") or delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(calls):
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"].get("arguments") or ""
    assert last == "data: [DONE]", last
    return [text, calls, reason]


async def tiers(client: httpx.AsyncClient) -> list[Any]:
    """Requests that run or wait, steps and requests that failed, and what each tier has given."""
    live = (await client.get("/v1/coattn/status")).json()["live"]
    used = {tier: (each["used_bytes"], each["held_bytes"]) for tier, each in sorted(live["tiers"].items())}
    return [len(live["requests"]), live["counts"]["failed_steps"], live["counts"]["requests"]["error"], used]


async def main() -> None:
    """Exits with 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["forms", "crowd"])
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server, whose memory is looked at")
    given = parser.parse_args()
    limits = httpx.Limits(max_connections=given.at_once + 4)
    async with httpx.AsyncClient(base_url=given.url, timeout=1800, limits=limits, trust_env=False) as client:
        if given.what == "forms":
            await forms(client, given.count, given.at_once)
        else:
            await crowd(client, given.count, given.at_once, given.seed, given.pid)


if __name__ == "__main__":
    asyncio.run(main())
