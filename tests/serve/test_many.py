"""Many clients at once, some of whom leave: nobody is lost, nobody is left, and every byte comes back."""

from __future__ import annotations

import asyncio
import json
import random

import httpx2 as httpx
from tests.engine.small import greedy
from tests.serve.running import Running, serving

REQUESTS, AT_ONCE = 100, 32


async def crowd(server: Running, want: dict[int, str]) -> dict[str, int]:
    limits = httpx.Limits(max_connections=AT_ONCE)
    count = {"answered": 0, "left": 0}
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as client:

        async def one(i: int) -> None:
            luck = random.Random(i)
            body = {"prompt": f"number {i % 5}", "max_tokens": 12, "temperature": 0, "stream": luck.random() < 0.5}
            leaves = luck.random() < 0.3
            async with gate:
                try:
                    async with asyncio.timeout(luck.random() * 0.15 if leaves else None):
                        if not body["stream"]:
                            got = await client.post("/v1/completions", json=body)
                            assert got.status_code == 200, got.text
                            text = got.json()["choices"][0]["text"]
                        else:
                            text = await streamed(client, body)
                except TimeoutError:
                    count["left"] += 1
                    return
            assert text == want[i % 5]
            count["answered"] += 1

        await asyncio.gather(*map(one, range(REQUESTS)))
    return count


async def streamed(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    text, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body) as got:
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            ended |= line == "data: [DONE]"
    assert ended
    return text


def test_a_crowd() -> None:
    with serving(max_waiting=2 * AT_ONCE) as server:  # those who leave wait until the engine has seen it
        want = {i: server.llm.submit(list(f"number {i}".encode()), greedy(12)).result().text for i in range(5)}
        before = (dict(server.llm.ledger.held), dict(server.llm.runner.runtime.free_bytes()))
        count = asyncio.run(crowd(server, want))
        assert count["answered"] + count["left"] == REQUESTS
        assert count["left"] > 0
        server.until_idle()
        assert not server.service.engine.calls
        assert (dict(server.llm.ledger.held), dict(server.llm.runner.runtime.free_bytes())) == before
        ended = server.llm.report()["requests"]
        assert ended["error"] == 0
        assert ended["length"] + ended["stop"] >= count["answered"] + 5
