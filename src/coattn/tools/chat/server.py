"""Who answers a conversation: a server, over OpenAI's API. It keeps no messages; all are sent with each."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack
from http.client import HTTPException
from typing import Any

from coattn.engine.sampling.params import SamplingParams
from coattn.errors import ConfigError, InputError, UnsupportedError
from coattn.progress import progress_line
from coattn.tools.chat.partner import Messages

TIMEOUT_S = 600.0
"""Seconds without a byte of an answer: a server shows signs of life more often."""


class Server:
    """Raises InputError where no server of coattn answers."""

    messages: Messages = []

    def __init__(self, url: str, key: str | None = None, progress: bool = False, timeout: float = 20.0) -> None:
        """url: where it is, with or without `/v1`; key: its API key; timeout: seconds to find it."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an http address.", "Write it like http://127.0.0.1:8000.")
        self.url, self._key, self._progress = url.rstrip("/").removesuffix("/v1"), key, progress
        self._stats = "nothing has been answered yet"
        with self._open("/v1/coattn/status", timeout=timeout) as found:
            try:
                state = json.load(found)
                self.model, self._row = state["model"], f"{state['method']} ({'exact' if state['exact'] else 'lossy'})"
                self._tokens = int(state["max_length"])
            except KeyError:
                raise InputError(f"The server at {self.url} is still loading.", "Wait until it is ready.") from None
            except (ValueError, TypeError):
                raise InputError(f"{self.url} is no server of coattn.", "Start one with `coattn serve`.") from None

    def greeting(self) -> str:
        """What it is, for people."""
        return f"{self.model} under {self._row}, up to {self._tokens:,} tokens, on the server at {self.url}"

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        """The answer in pieces. Closing the iterator cancels it. Raises CoattnError."""
        sampling = {"max_tokens": asked.max_new_tokens, "temperature": asked.temperature, "top_p": asked.top_p}
        body = {"messages": messages, **sampling, "stream": True, "stream_options": {"include_usage": True}}
        usage: dict[str, int] = {}
        start, first, ended = time.perf_counter(), 0.0, False
        with ExitStack() as line, self._open("/v1/chat/completions", body) as lines:
            show = line.enter_context(progress_line(self._progress))
            try:
                for each in lines:
                    if each.startswith(b": prompt "):
                        read, whole = map(int, each.split()[2].split(b"/"))
                        show("reading", read, whole, f"{read:,} of {whole:,} tokens")
                    ended |= each.startswith(b"data: [DONE]")
                    chunk = json.loads(each[6:]) if each.startswith(b"data: {") else {}
                    if "error" in chunk:
                        raise InputError(str(chunk["error"]["message"]), "Look at the server.")
                    usage = chunk.get("usage") or usage
                    for piece in (choice["delta"].get("content") for choice in chunk.get("choices", ())):
                        if piece and sys.stdout.isatty():
                            line.pop_all().close()
                        first = first or (time.perf_counter() - start if piece else 0.0)
                        yield piece or ""
            except (OSError, HTTPException):
                ended = False
        if not ended:  # a line that is cut looks like the end of the answer to `urllib`
            raise InputError("The server broke off before its answer was over.", "Is it still running?")
        read, new = usage["prompt_tokens"], usage["completion_tokens"]
        speed = (new - 1) / max(time.perf_counter() - start - first, 1e-9)
        self._stats = f"{self._row}: {read:,} tokens read, {new:,} written, first after {first:.2f} s"
        self._stats += f", {speed:.1f} tokens/s" if new > 1 else ""

    def stats(self) -> str:
        """What the last answer took, for people."""
        return self._stats

    def switch(self, method: str) -> str:
        """A server has one method. Raises UnsupportedError."""
        raise UnsupportedError("A server keeps its method.", "Start another one, or leave --url out.")

    def close(self) -> None:
        """Nothing is held between two answers."""

    def _open(self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_S) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return direct.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout)
        except urllib.error.HTTPError as error:
            try:
                said = str(json.load(error)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                said = f"{self.url} answers {error.code} {error.reason}."
            hint = "Set COATTN_API_KEY and give --url." if error.code == 401 else "Is it a server of coattn?"
            raise InputError(said, hint) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no request can have this address or key
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise InputError(f"{self.url} cannot be reached: {reason}.", "Is the server running?") from None
