"""A process that reads prompts, and a server that has them read, over the very small model.

They are forked from a process that has imported everything already, so that one that was killed is soon replaced.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.engine.small import llm, small, tokenizer

from coattn.hf.load import Loaded
from coattn.transfer.prefill import PrefillServer

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["coattn.serve.lifecycle", "coattn.transfer.decode", "transformers.models.llama.modeling_llama", "httpx2"]
)  # nothing that asks for a GPU: it could not be used after a fork
READY = 120


def read_prompts(told: Connection, address: str, options: dict[str, Any]) -> None:
    """Runs in the child."""
    server = PrefillServer(Loaded(small(), tokenizer(), "small", None), address, **options)
    told.send(str(server.address))
    server.serve()


def serve(told: Connection, address: str, remote: dict[str, Any], options: dict[str, Any]) -> None:
    """Runs in the child: `coattn serve --role decode`."""
    import asyncio

    import coattn
    from coattn.serve.lifecycle import Service
    from coattn.serve.settings import Settings
    from coattn.transfer.decode import RemotePrefill

    def open_engine() -> coattn.LLM:
        made = llm(**options)
        RemotePrefill(made, address, **remote).attach()
        return made

    service = Service(Settings(port=0, names=("small",), drain=5), open_engine)
    told.send(f"http://127.0.0.1:{service.port}")
    asyncio.run(service.run())


class Process:
    """A child, and what it said when it was ready."""

    def __init__(self, run: Any, *arguments: Any) -> None:
        ours, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=run, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert ours.poll(READY), "the process did not start"
        self.said: str = ours.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.join()

    def mapped(self) -> int:
        """Memory of prompts that the process still maps."""
        return Path(f"/proc/{self.pid}/maps").read_text().count("coattn-prompt")


def prefill(kind: str, folder: Path, **options: Any) -> Process:
    """chunk: few tokens make many frames."""
    place = f"shm://{folder / 'socket'}" if kind == "shm" else "tcp://127.0.0.1:0"
    return Process(read_prompts, place, {"chunk": 16, **options})


@contextmanager
def reading(kind: str, folder: Path, **options: Any) -> Iterator[Process]:
    process = prefill(kind, folder, **options)
    try:
        yield process
    finally:
        if process.process.is_alive():  # the test may have killed it
            process.kill()


class Server(Process):
    """A server whose prompts are read elsewhere, and a client for it; needs the extra serve and httpx2."""

    def __init__(self, at: str, remote: dict[str, Any], options: dict[str, Any]) -> None:
        import httpx2 as httpx

        super().__init__(serve, at, remote, options)
        self.client = httpx.Client(base_url=self.said, timeout=30, trust_env=False)
        for _ in range(1000):
            if self.client.get("/ready").status_code == 200:
                return
        raise AssertionError("the server is not ready")

    def ask(self, ids: list[int], tokens: int, timeout: float) -> tuple[int, ...] | str:
        """The answer's ids, or what went wrong."""
        import httpx2 as httpx

        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        try:
            got = self.client.post("/v1/completions", json=body, timeout=timeout)
        except httpx.TransportError as error:
            return type(error).__name__
        if got.status_code != 200:
            return str(got.json()["error"]["code"])
        return tuple(got.json()["choices"][0]["token_ids"])
