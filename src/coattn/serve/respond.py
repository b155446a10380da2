"""The way of a request that asks for text: in line, out as one object or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.head import total_cached, total_usage, usage
from coattn.serve.ask import salt
from coattn.serve.call import HttpCall, Order
from coattn.serve.context import Context
from coattn.serve.errors import ApiError
from coattn.serve.gate import TENANT
from coattn.serve.schema.base import Sampling
from coattn.serve.sse import DONE, EventStream, GoneError, comment, event, unless_gone

Json = dict[str, Any]
CLOSED = 499
"""The status of a response whose client has left."""


class Whole(Protocol):
    """Builds what a client gets that does not stream."""

    def whole(self, outputs: list[RequestOutput], choices: int, /) -> Json: ...


class Answer(Whole, Protocol):
    """Builds the chunks of a stream, too."""

    chunk_head: Json

    def first(self, index: int) -> Json | None: ...
    def part(self, index: int, delta: RequestOutput) -> Json | None: ...
    def last(self, index: int, output: RequestOutput) -> Json: ...


A = TypeVar("A", bound=Whole)
Events = Callable[[HttpCall, A, Sampling, Order, Context], AsyncIterator[bytes]]


async def respond(
    request: Request,
    context: Context,
    body: Sampling,
    wanted: int,
    make: Callable[[LLM], Order],
    build: Callable[[LLM, Order], A],
    stream: Events[A],
) -> Response:
    """wanted: answers in all; make: runs on another thread; build: the answer's form; stream: its events.

    A stream's headers wait for its first event, so that what fails before it has a status of its own.
    """
    call = HttpCall(context.engine, wanted)
    streaming = False

    def tagged(llm: LLM) -> Order:
        whose = salt(body, request.scope.get(TENANT, b""))
        return replace(make(llm), salt=whose, session=body.session_id)

    try:
        order = await unless_gone(request.receive, call.open(tagged, context.threads))
        answer = build(call.llm, order)
        if not body.stream:
            outputs = await unless_gone(request.receive, call.results())
            for output in outputs:
                context.metrics.done(output)
            return JSONResponse(answer.whole(outputs, order.choices))
        events = stream(call, answer, body, order, context)
        first = await unless_gone(request.receive, anext(events))
        streaming = True
        return EventStream(_after(first, events), call.close)
    except GoneError:
        return Response(status_code=CLOSED)
    finally:
        if not streaming:
            call.close()


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in rest:
        yield each


async def chunks(
    call: HttpCall, answer: Answer, body: Sampling, order: Order, context: Context
) -> AsyncIterator[bytes]:
    """Every event of a stream. An error before the first is raised; a later one is an event of its own."""
    options = body.stream_options
    counted = bool(options and options.include_usage)
    always = bool(options and options.continuous_usage_stats)
    latest: dict[int, RequestOutput] = {}
    told: dict[int, float] = {}
    started = False

    def made(chunk: Json | None) -> bytes:
        if chunk is None:
            return b""
        if always:
            new = sum(each.new_tokens for each in latest.values())
            cached = total_cached(latest, order.choices)
            chunk["usage"] = usage(sum(len(ids) for ids in order.prompts), new, cached)
        elif counted:
            chunk["usage"] = None
        return event(chunk)

    try:
        async for item in call.deltas(context.settings.keep_alive):
            if item is None:
                started = True
                yield waiting(call)
                if body.return_progress and not latest:
                    read, whole = call.progress()
                    shown = {"processed": read, "total": whole}
                    yield event({**answer.chunk_head, "choices": [], "prompt_progress": shown})
                continue
            index, delta = item
            data = b"" if index in latest else made(answer.first(index))
            latest[index] = delta
            data += made(answer.part(index, delta))
            now = time.perf_counter()
            if index in told:
                context.metrics.between(now - told[index])
            told[index] = now
            if delta.finish_reason is not None:
                context.metrics.done(delta)
                data += made(answer.last(index, delta))
            if data:
                started = True
                yield data
    except ApiError as error:
        if not started:
            raise
        yield event(error.body()) + DONE
        return
    if counted:
        outputs = [latest[index] for index in sorted(latest)]
        yield event({**answer.chunk_head, "choices": [], "usage": total_usage(outputs, order.choices)})
    yield DONE


def waiting(call: HttpCall) -> bytes:
    """A sign of life: how much of the prompts has been read."""
    read, whole = call.progress()
    return comment(f"prompt {read}/{whole}")
