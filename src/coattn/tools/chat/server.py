"""Who answers a conversation: a server, over OpenAI's API. It keeps no messages; all are sent with each."""

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
from coattn.errors import ConfigError, InputError
from coattn.progress import progress_line
from coattn.tools.chat.partner import Messages

TIMEOUT_S = 600.0
"""Seconds without a byte of an answer: a server shows signs of life more often."""


class Server:
    """url: where it is, with or without `/v1`; key: its API key; timeout: seconds to find it."""

    messages: Messages = []

    def __init__(self, url: str, key: str | None = None, progress: bool = False, timeout: float = 20.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an http address.", "Write it like http://127.0.0.1:8000.")
        self.url, self._key, self._progress = url.rstrip("/").removesuffix("/v1"), key, progress
        self._stats = "nothing has been answered yet"
        with self._open("/v1/coattn/status", None, timeout) as found:
            try:
                state = json.load(found)
                self._model, self._row = state["model"], f"{state['method']} ({'exact' if state['exact'] else 'lossy'})"
                self._tokens = int(state["max_length"])
            except (ValueError, TypeError, KeyError):
                raise InputError(f"{self.url} is no server of coattn, or still loading.", "Is it ready?") from None

    def greeting(self) -> str:
        """What it is, for people."""
        return f"{self._model} under {self._row}, up to {self._tokens:,} tokens, on the server at {self.url}"

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        """The answer in pieces. Closing the iterator cancels it. Raises CoattnError."""
        body = {"model": self._model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": asked.max_new_tokens, "temperature": asked.temperature, "top_p": asked.top_p}
        chunk: dict[str, Any] = {}
        start, first = time.perf_counter(), 0.0
        with ExitStack() as line, self._open("/v1/chat/completions", body) as lines:
            show = line.enter_context(progress_line(wanted=self._progress))
            try:
                for each in lines:
                    if each.startswith(b": prompt "):
                        read, whole = map(int, each.split()[2].split(b"/"))
                        show("reading", read, whole, f"{read:,} of {whole:,} tokens")
                    if not each.startswith(b"data: {"):
                        continue
                    chunk = json.loads(each[6:])
                    if "error" in chunk:
                        raise InputError(str(chunk["error"]["message"]), "Look at the server.")
                    for piece in filter(None, (choice["delta"].get("content") for choice in chunk["choices"])):
                        if sys.stdout.isatty():
                            line.close()
                        first = first or time.perf_counter() - start
                        yield piece
            except (OSError, HTTPException):
                chunk = {}
        if not chunk.get("usage"):  # a line that is cut looks like the end of the answer to `urllib`
            raise InputError("The server broke off before its answer was over.", "Is it still running?")
        read, new = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
        self._stats = f"{self._row}: {read:,} tokens read, {new:,} written, first after {first:.2f} s"
        self._stats += f", {(new - 1) / max(time.perf_counter() - start - first, 1e-9):.1f} tokens/s"

    def stats(self) -> str:
        """What the last answer took, for people."""
        return self._stats

    def close(self) -> None:
        """Nothing is held between two answers."""

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float = TIMEOUT_S) -> Any:
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
        }
        data = None if body is None else json.dumps(body).encode()
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return direct.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            hint = "Set COATTN_API_KEY and give --url." if error.code == 401 else "Look at the server."
            raise InputError(f"{self.url} answers {error.code} {error.reason}: {said}", hint) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no request can have this address or key
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise InputError(f"{self.url} cannot be reached: {reason}.", "Is the server running?") from None
