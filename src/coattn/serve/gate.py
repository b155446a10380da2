"""What every request passes first: its key, its host, its id."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coattn.serve.errors import ApiError
from coattn.transfer.address import is_local

PUBLIC = frozenset({"/", "/health", "/ready", "/metrics"})
"""Paths that need no key, beside the files of the page: probes and Prometheus have none."""
TENANT = "coattn.tenant"
"""In a request's scope: whose it is, by the hash of the key."""
log = logging.getLogger(__name__)
WORD = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Refuses who has no key. Without keys, only names of this machine are answered to. Every request is a line of the
    log; those that only look, as pages and probes do many times a minute, are debug lines.

    That last rule keeps a web page from reaching a server on localhost under a name that it has pointed there.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str]) -> None:
        self.app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if WORD.fullmatch(given) else uuid.uuid4().hex
        start, status = time.perf_counter(), 0

        async def mark(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        refused = self._refuse(scope, headers)
        try:
            await (self.app if refused is None else refused.response(scope["path"]))(scope, receive, mark)
        finally:
            level = logging.INFO if scope["method"] == "POST" else logging.DEBUG
            what, seconds = f"{scope['method']} {quote(scope['path'])}", time.perf_counter() - start
            log.log(level, "%s: %s in %.2f s, request %s", what, status or "no answer", seconds, name)

    def _refuse(self, scope: Scope, headers: Headers) -> ApiError | None:
        path: Any = scope["path"]
        if not self._keys:
            host = _host(headers.get("host", ""))
            if self._hosts and host not in self._hosts:
                return ApiError(403, "This server answers to names of its own machine only.", code="host_not_allowed")
            return None
        if path in PUBLIC or path.startswith("/page/") or scope["method"] == "OPTIONS":
            return None
        scheme, _, key = headers.get("authorization", f"bearer {headers.get('x-api-key', '')}").partition(" ")
        raw = key.strip().encode("latin-1")  # as the headers were decoded
        found = hashlib.sha256(raw if scheme.lower() == "bearer" else b"").digest()
        # every key is compared, so that the time tells nothing
        if sum(hmac.compare_digest(found, each) for each in self._keys):
            scope[TENANT] = found
            return None
        said = "The API key is missing or wrong. Send it as Authorization: Bearer KEY, or as x-api-key."
        return ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def local_hosts(host: str) -> tuple[str, ...]:
    """The names under which a server that listens on `host` may be asked for without a key."""
    return ("localhost", "127.0.0.1", "::1", host) if is_local(host) else ()


def _host(value: str) -> str:
    """`[::1]:8000` -> `::1`"""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.rpartition(":")[0].lower() if ":" in value else value.lower()
