"""OpenTelemetry's spans of requests. Its packages are imported only where a server is told to send traces."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from coattn._version import __version__
from coattn.engine.request import RequestOutput

PHASES = ("queue", "read", "decode")
"""What an answer goes through, each with a span inside the request's."""


class Spans:
    """Makes spans of answers that have ended, and sends them from a thread of its own. They hold counts and times, no
    text. A caller's `traceparent` header is their parent."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        """endpoint: of a collector, as OTLP over HTTP has it. exporter: what sends them there, if not the usual one."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
        named = {"service.name": "coattn", "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("coattn")
        self._parent = TraceContextTextMapPropagator().extract
        self._inside = set_span_in_context

    def done(self, request: Request, output: RequestOutput, model: str) -> None:
        """An answer to this request has just ended."""
        marks = (0.0, output.waited_s, output.first_token_s, output.total_s)
        end = time.time_ns()

        def at(seconds: float) -> int:
            return end - round(1e9 * ((output.total_s or 0.0) - seconds))

        attributes = {
            "http.route": request.url.path,
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": output.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": output.cached_tokens,
            "gen_ai.usage.output_tokens": output.new_tokens,
            "gen_ai.response.finish_reasons": (output.finish_reason or "",),
            "coattn.preemptions": output.preemptions,
        }
        parent = self._parent(dict(request.headers))
        whole = self._tracer.start_span("request", parent, start_time=at(0.0), attributes=attributes)
        for name, start, stop in zip(PHASES, marks, marks[1:], strict=False):
            if start is not None and stop is not None:
                self._tracer.start_span(name, self._inside(whole), start_time=at(start)).end(at(stop))
        whole.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
