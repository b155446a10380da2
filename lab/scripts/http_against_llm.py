"""The same requests through `LLM.generate` and through the HTTP server, as streams, over one engine: tokens/s and their
ratio, and the processor time of this process for each token.

    python lab/scripts/http_against_llm.py [--shapes qwen3-8b] [--requests 64] [--prompt 512] [--new 128] [--batch 16]

Weights, tokens and the tokenizer's words are random. The client is a process of its own. Each way runs twice after a
first short one, and the better time counts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any

import click
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from coattn import LLM, SamplingParams
from coattn.hf.load import choose_device, choose_dtype
from coattn.serve.lifecycle import Service
from coattn.serve.settings import Settings
from coattn_lab.bench.random_model import random_model
from coattn_lab.bench.requests import prompts_of
from coattn_lab.bench.stream import Item


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, each a word of five letters or more with a blank before it."""
    known = {"\u0120" + "".join(chr(97 + i // 26**place % 26) for place in range(5)): i for i in range(count)}
    inner = Tokenizer(models.BPE(vocab=known, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


async def ask(port: int, body: bytes) -> int:
    """One streamed completion -> its tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
    said = await reader.read()
    writer.close()
    if b" 200 " not in said[:20] or not said.rstrip(b"\r\n0").endswith(b"[DONE]"):
        raise SystemExit(f"a request failed: {said[:500]!r}")
    usage = said[said.rindex(b'"usage":') :]
    return int(json.JSONDecoder().raw_decode(usage[8:].decode())[0]["completion_tokens"])


async def client(port: int, bodies: list[bytes]) -> None:
    """Prints the seconds from the first request to the last answer, and the tokens of all."""
    begun = time.perf_counter()
    counts = await asyncio.gather(*(ask(port, body) for body in bodies))
    print(json.dumps({"seconds": time.perf_counter() - begun, "tokens": sum(counts)}))


def through_http(port: int, prompts: list[list[int]], new: int) -> dict[str, float]:
    """What `client` prints, as a process."""
    more = {"max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}
    more["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({"model": "m", "prompt": ids, **more}) for ids in prompts]
    done = subprocess.run(
        [sys.executable, __file__, "--client", str(port)],
        input="\n".join(bodies),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def through_llm(llm: LLM, prompts: list[list[int]], new: int) -> dict[str, float]:
    """The same, by `LLM.generate`."""
    begun = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=0))
    return {"seconds": time.perf_counter() - begun, "tokens": sum(each.new_tokens for each in outputs)}


class Served:
    """A server of an engine on a thread, which has the engine from then on and closes it."""

    def __init__(self, llm: LLM) -> None:
        self.service = Service(Settings(port=0, names=("m",)), lambda: llm)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        while self.service.engine.state == "loading":
            time.sleep(0.01)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.service.run(signals=False)

    def close(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.service.stop)
        self.thread.join()


def better(run: Any, *given: Any) -> dict[str, float]:
    """Of two runs; with microseconds of this process's processors for each token."""
    found = []
    for _ in range(2):
        before = time.process_time()
        made = run(*given)
        found.append({**made, "cpu_us": (time.process_time() - before) / made["tokens"] * 1e6})
    return min(found, key=lambda each: each["seconds"])


@click.command()
@click.option("--shapes", default="qwen3-8b")
@click.option("--requests", default=64)
@click.option("--prompt", default=512)
@click.option("--new", default=128)
@click.option("--batch", default=16)
@click.option("--device", default="auto")
@click.option("--client", "port", type=int, hidden=True)
def main(shapes: str, requests: int, prompt: int, new: int, batch: int, device: str, port: int | None) -> None:
    """Runs both ways, prints a line for each and the ratio."""
    if port is not None:
        asyncio.run(client(port, sys.stdin.read().encode().split(b"\n")))
        return
    where = choose_device(device)
    model = random_model(shapes, where, choose_dtype("auto", where))
    vocabulary = int(model.config.vocab_size)
    prompts = prompts_of([Item(0, prompt, new)] * requests, vocabulary, 0)
    room = {"max_batch": batch, "max_length": prompt + new, "reuse": False, "progress": False}
    llm = LLM((model, words(vocabulary)), "full", **room)
    llm.warm_up()
    through_llm(llm, prompts[:batch], min(new, 8))
    rows = {"LLM": better(through_llm, llm, prompts, new)}
    served = Served(llm)
    try:
        through_http(served.service.port, prompts[:batch], min(new, 8))
        rows["HTTP"] = better(through_http, served.service.port, prompts, new)
    finally:
        served.close()
    for name, row in rows.items():
        rate = row["tokens"] / row["seconds"]
        print(f"{name:>5}: {rate:,.1f} tokens/s, {row['cpu_us']:.0f} us of processors a token")
    own, over = (row["tokens"] / row["seconds"] for row in rows.values())
    print(f"ratio: {over / own:.3f}, {1e6 / over - 1e6 / own:.1f} us a token more")


if __name__ == "__main__":
    main()
