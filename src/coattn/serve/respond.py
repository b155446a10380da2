"""The way of a request that asks for text: in line, out as one object or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.engine.llm import LLM
from coattn.engine.store.keys import digest
from coattn.serve.answer.head import ChoiceAnswer
from coattn.serve.answer.messages import MessagesAnswer
from coattn.serve.answer.ollama import OllamaAnswer
from coattn.serve.answer.responses import ResponsesAnswer
from coattn.serve.call import HttpCall, Order
from coattn.serve.context import Context
from coattn.serve.errors import ApiError
from coattn.serve.gate import TENANT
from coattn.serve.schema.base import Sampling
from coattn.serve.sse import EVENTS, EventStream, GoneError, unless_gone

Answer = ChoiceAnswer | MessagesAnswer | OllamaAnswer | ResponsesAnswer
"""Builds what a client gets: `whole`, or the events of a stream as bytes."""
POSITION = "x-queue-position"
"""The header that says how many requests had to end before this one could begin when it came."""
CLOSED = 499
"""The status of a response whose client has left."""


async def respond(
    request: Request,
    context: Context,
    body: Sampling,
    wanted: int,
    make: Callable[[LLM], Order],
    build: Callable[[LLM, Order], Answer],
    media: str = EVENTS,
) -> Response:
    """wanted: answers in all; make: runs on another thread, for what is not in every body; build: the answer's form;
    media: the type of a stream.

    A stream's headers wait for its first event, so that what fails before it has a status of its own.
    """
    tenant = request.scope.get(TENANT, b"")
    if context.engine.calls:  # else nobody's end would give memory back
        context.limits.check_memory(context.engine.pace.seconds())
    context.limits.check(tenant, wanted)
    call = HttpCall(context.engine, wanted, lambda each: context.limits.leave(tenant, wanted, each.computed()))
    context.limits.enter(tenant, wanted)
    streaming = False
    headers = {POSITION: str(call.ahead)}
    limits = [each for each in (body.timeout_s, context.settings.request_timeout) if each is not None]

    def full(llm: LLM) -> Order:
        return replace(
            make(llm),
            streams=bool(body.stream),
            priority=body.priority or 0,
            timeout=min(limits, default=None),
            # requests of one key, and among them those of one cache_salt, share what is stored
            salt=digest("tenant", tenant, body.cache_salt or "") if tenant or body.cache_salt else b"",
            session=body.session_id,
        )

    try:
        order = await unless_gone(request.receive, call.open(full, context.threads))
        answer = build(call.llm, order)
        if not body.stream:
            outputs = await unless_gone(request.receive, call.results())
            for output in outputs:
                context.metrics.done(output)
            return JSONResponse(answer.whole(outputs), headers=headers)
        events = _events(call, answer, context)
        first = await unless_gone(request.receive, anext(events))
        streaming = True
        return EventStream(events, call.close, first, media, headers)
    except GoneError:
        return Response(status_code=CLOSED)
    finally:
        if not streaming:
            call.close()


async def _events(call: HttpCall, answer: Answer, context: Context) -> AsyncIterator[bytes]:
    """Every event of a stream. An error before the first is raised; a later one is an event of its own."""
    told: dict[int, float] = {}
    started = False
    try:
        async for item in call.deltas(context.settings.keep_alive):
            if item is None:
                data = answer.waiting(*call.progress())
            else:
                index, delta = item
                data = answer.delta(index, delta)
                now = time.perf_counter()
                if index in told:
                    context.metrics.observe("inter_token_latency_seconds", now - told[index])
                told[index] = now
                if delta.finish_reason is not None:
                    context.metrics.done(delta)
            if data:
                started = True
                yield data
    except ApiError as error:
        if not started:
            raise
        yield answer.failed(error)
        return
    if data := answer.end():
        yield data
