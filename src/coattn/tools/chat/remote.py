"""A server that speaks OpenAI's protocol, by the standard library alone."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from http.client import HTTPException
from typing import Any

from coattn.engine.sampling.params import SamplingParams
from coattn.errors import ConfigError, InputError, UnsupportedError
from coattn.tools.chat.talk import Messages, Stats

TIMEOUT = 600.0
"""Seconds without a byte; a server of ours shows signs of life more often."""
FOREIGN = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What an answer raises that is not of OpenAI's form."""


class Remote:
    """url: where the server is, with or without `/v1`; key: its API key; model: left out, the first that it names.

    session: its `session_id` there."""

    said: Messages = []
    """A server keeps no messages."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None, session: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--url is {url!r}, which is not an http address.", "Write it like http://127.0.0.1:8000."
            )
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key, self._session = key, session
        self.stats: Stats | None = None
        self.model = model or self._first()

    def answer(self, messages: Messages, asked: SamplingParams) -> Generator[str, None, None]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._session is not None:
            body["session_id"] = self._session
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        own: dict[str, Any] = {}
        ended = False
        start, first = time.perf_counter(), None
        try:
            with self._open("/chat/completions", body) as lines:
                for line in lines:
                    ended = ended or line.startswith(b"data: [DONE]")
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise InputError(str(chunk["error"].get("message", "The server failed.")), "Try again.")
                    usage, own = chunk.get("usage") or usage, chunk.get("coattn") or own
                    for choice in chunk["choices"]:
                        piece = choice["delta"].get("content") or ""
                        if piece and first is None:
                            first = time.perf_counter() - start
                        yield piece
        except (OSError, HTTPException):
            ended = False
        except FOREIGN:
            raise self._foreign() from None
        if not ended:  # a line that is cut looks like the end of the answer to `urllib`
            raise InputError("The server broke off before its answer was over.", "Is it still running?")
        new, whole = usage["completion_tokens"], time.perf_counter() - start
        speed = None if first is None or new < 2 else (new - 1) / max(whole - first, 1e-9)
        kv = own["choices"][0]["kv_bytes"] if own else {}
        method, exact = own.get("method", "unknown"), own.get("exact")
        self.stats = Stats(method, exact, usage["prompt_tokens"], new, first, speed, kv)

    def switch(self, method: str) -> str:
        raise UnsupportedError("A server keeps the method it was started with.", "Start another one with --method.")

    def close(self) -> None:
        """Nothing is held between two answers."""

    def _first(self) -> str:
        with self._open("/models") as found:
            try:
                names = [each["id"] for each in json.load(found)["data"]]
            except (*FOREIGN, OSError, HTTPException):
                raise self._foreign() from None
        if not names:
            raise InputError("The server names no model.", "It may still be loading: try again, or give --model.")
        return str(names[0])

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            hint = "Change what you asked, or look at the server."
            raise InputError(_said(error), "Set COATTN_API_KEY to its key." if error.code == 401 else hint) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no request can have this address or key
            reason = " ".join(str(getattr(error, "reason", error)).split())
            raise InputError(f"{self._base} cannot be reached: {reason}.", "Is the server running?") from None

    def _foreign(self) -> InputError:
        return InputError(f"{self._base} does not answer as OpenAI's API does.", "Is this the address of the server?")


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {error.code} {error.reason}."
