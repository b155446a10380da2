"""Sends a stream of requests to a server and tells when every token came; by the standard library alone.

Run as a file: URL as its argument, a JSON object on stdin, one on stdout; see `bench/http.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit


async def send(url: str, key: str | None, raw: bytes) -> tuple[list[float], dict[str, Any], str | None]:
    """Times of the tokens, the object `coattn` of the last chunk if there is one, and what went wrong."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port or 80, limit=1 << 22)
    head = f"POST {at.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    times: list[float] = []
    own: dict[str, Any] = {}
    try:
        status = (await reader.readline()).split()[1:2]
        while (await reader.readline()).strip():
            pass
        if status != [b"200"]:
            return times, own, (await reader.read(2000)).decode("utf-8", "replace")
        async for line in _lines(reader):
            if not line.startswith(b"data: {"):
                continue
            now, chunk = time.perf_counter(), json.loads(line[6:])
            if "error" in chunk:
                return times, own, str(chunk["error"])
            own = chunk.get("coattn") or own
            for choice in chunk["choices"]:
                known = choice.get("token_ids")
                times += [now] * (len(known) if known is not None else bool(choice["text"]))
    finally:
        writer.close()
    return times, own, None


async def _lines(reader: asyncio.StreamReader) -> Any:
    """Lines of a body that comes in chunks."""
    left = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        *whole, left = (left + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        for line in whole:
            yield line


async def play(url: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Every request when its time has come; times are seconds since the first could have."""
    bodies = [_body(item, given.get("model")) for item in given["items"]]  # before the time counts
    begin = time.perf_counter()

    async def one(item: dict[str, Any], body: bytes) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, begin + item["arrival_s"] - time.perf_counter()))
        try:
            times, own, error = await send(url, given.get("key"), body)
        except OSError as failed:
            times, own, error = [], {}, str(failed)
        return {"tokens": [each - begin for each in times], "coattn": own, "error": error}

    return list(await asyncio.gather(*map(one, given["items"], bodies)))


def _body(item: dict[str, Any], model: str | None) -> bytes:
    asked = {
        "prompt": item["prompt"],
        "max_tokens": item["new_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **({"model": model} if model else {}),
    }
    return json.dumps(asked).encode()


if __name__ == "__main__":
    json.dump(asyncio.run(play(sys.argv[1], json.load(sys.stdin))), sys.stdout)
