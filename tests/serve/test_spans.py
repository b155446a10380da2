"""Spans of requests: they hold what the answer says of itself, and nothing is imported where nobody asks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.serve.running import HELLO, serving

import coattn.serve.context
from coattn.cli.serve import check_traces
from coattn.errors import ConfigError
from coattn.serve.settings import Settings
from coattn.serve.spans import PHASES, Spans

URL = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_has_its_phases(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    monkeypatch.setattr(coattn.serve.context, "Spans", lambda url: Spans(url, memory))
    with serving(Settings(port=0, names=("small",), traces=URL)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        got = server.post("/v1/chat/completions", {**HELLO, "stream": streams}, headers=headers)
        assert got.status_code == 200
        assert server.post("/v1/messages", {**HELLO, "max_tokens": 2}).status_code == 200
        assert server.post("/v1/chat/completions", {**HELLO, "model": "no"}).status_code == 404
    found = memory.get_finished_spans()  # what was left was sent when the server stopped
    first, second = [each for each in found if each.name == "request"]
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == PARENT
    assert second.context.trace_id != first.context.trace_id
    assert second.parent is None
    given: dict[str, Any] = dict(first.attributes)
    assert given["http.route"] == "/v1/chat/completions"
    assert (given["gen_ai.usage.output_tokens"], given["gen_ai.response.finish_reasons"]) == (4, ("length",))
    assert given["gen_ai.usage.input_tokens"] > 4
    for whole in (first, second):
        inner = [each for each in found if each.parent is not None and each.parent.span_id == whole.context.span_id]
        assert tuple(each.name for each in inner) == PHASES
        assert whole.start_time == inner[0].start_time < inner[0].end_time == inner[1].start_time
        assert inner[1].end_time == inner[2].start_time < inner[2].end_time == whole.end_time


def test_nothing_is_imported_where_nobody_asks() -> None:
    code = "import sys, coattn.serve.spans, coattn.serve.context; print('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_where_spans_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="which is no address"):
        check_traces("localhost:4318")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        check_traces(URL)
