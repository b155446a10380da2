"""Loads on a running server: `serve_load.py forms URL`, `serve_load.py crowd URL`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import httpx2 as httpx

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


async def crowd(client: httpx.AsyncClient, count: int, at_once: int) -> None:
    """Half stream, a third leave in the middle. Whoever stays gets what the same prompt gets alone."""
    prompts = [f"Count the {thing}:" for thing in ("trees", "stars", "fish", "books", "hills")]
    before = await tiers(client)  # of an idle server: what an answer took is given back a moment after it
    alone = [await answer(client, prompt, False) for prompt in prompts]
    gate, counts = asyncio.Semaphore(at_once), {"answered": 0, "left": 0, "wrong": 0}

    async def one(i: int) -> None:
        luck = random.Random(i)
        leaves = luck.random() < 1 / 3
        async with gate:
            try:
                async with asyncio.timeout(luck.random() * 8 if leaves else None):
                    text = await answer(client, prompts[i % 5], luck.random() < 0.5)
            except TimeoutError:
                counts["left"] += 1
                return
        counts["answered" if text == alone[i % 5] else "wrong"] += 1

    begin = time.perf_counter()
    await asyncio.gather(*map(one, range(count)))
    took = time.perf_counter() - begin
    for _ in range(100):
        after = await tiers(client)
        if after == before:
            break
        await asyncio.sleep(0.2)
    print(f"{counts} of {count} in {took:.1f} s; requests left and bytes used per tier: {before} before, {after} after")
    assert sum(counts.values()) == count
    assert counts["wrong"] == 0
    assert after == before


async def answer(client: httpx.AsyncClient, prompt: str, streams: bool) -> str:
    """The text of one completion, checked for its end."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": streams}
    if not streams:
        got = await client.post("/v1/completions", json=body)
        got.raise_for_status()
        return str(got.json()["choices"][0]["text"])
    text, last = "", ""
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            last = line or last
    assert last == "data: [DONE]"
    return text


async def tiers(client: httpx.AsyncClient) -> list[Any]:
    """Requests that run or wait, and what each tier has given them."""
    live = (await client.get("/v1/coattn/status")).json()["live"]
    used = {tier: (each["used_bytes"], each["held_bytes"]) for tier, each in sorted(live["tiers"].items())}
    return [len(live["requests"]), used]


async def main() -> None:
    """Exits with 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["forms", "crowd"])
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    limits = httpx.Limits(max_connections=given.at_once + 4)
    async with httpx.AsyncClient(base_url=given.url, timeout=1800, limits=limits, trust_env=False) as client:
        await (forms if given.what == "forms" else crowd)(client, given.count, given.at_once)


if __name__ == "__main__":
    asyncio.run(main())
