"""What the routes of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from coattn.serve.body import read
from coattn.serve.engine import EngineThread
from coattn.serve.errors import ApiError
from coattn.serve.guide import Grammars
from coattn.serve.limits import Limits
from coattn.serve.metrics import Metrics
from coattn.serve.schema.base import Posted
from coattn.serve.settings import Settings

M = TypeVar("M", bound=Posted)
PROMPT_THREADS = 2
"""Threads that cut texts into tokens."""


class Context:
    """The engine's thread, the settings, the metrics, and names."""

    def __init__(self, settings: Settings, engine: EngineThread) -> None:
        self.settings, self.engine = settings, engine
        self.threads = ThreadPoolExecutor(PROMPT_THREADS, "coattn-prompts")
        self.grammars = Grammars(settings.max_grammar)
        self.metrics = Metrics(engine, lambda: self.names[0])
        self.limits = Limits(settings.key_requests, settings.key_tokens)
        self.started = time.time()

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called here; of a folder its last part."""
        if self.settings.names:
            return self.settings.names
        llm = self.engine.llm
        if llm is None:
            return ("",)
        return (Path(llm.name).name if llm.name.startswith(("/", ".", "~")) else llm.name,)

    def model(self, asked: str | None) -> str:
        """The name to answer under. Raises ApiError 404 for a model that is not here."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            known = ", ".join(self.names)
            said = f"The model {asked[:200]!r} is not served here. Use {known}."
            raise ApiError(404, said, param="model", code="model_not_found")
        return asked

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()


def context(request: Request) -> Context:
    """The context of the app that got this request."""
    found: Context = request.app.state.context
    return found


async def asked(request: Request, kind: type[M]) -> tuple[Context, M, str]:
    """The context of the app that got this request, its body, and the model's name in the answer. Raises ApiError."""
    here = context(request)
    body = await read(request, kind, here.settings)
    return here, body, here.model(body.model)
