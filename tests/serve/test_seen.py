"""What can be seen from outside: metrics, status, the live events, the published schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.engine.small import llm, prompt
from tests.serve.running import HELLO, Running, serving

import coattn
from coattn.step.runtime import Runtime


def value(text: str, name: str) -> float:
    found = re.search(rf"^coattn:{re.escape(name)} (\S+)$", text, re.M)
    assert found is not None, name
    return float(found[1])


def test_metrics_count_what_happened() -> None:
    with serving() as server:
        for streams in (False, True):
            body = {**HELLO, "max_tokens": 6, "ignore_eos": True, "stream": streams}
            assert server.post("/v1/chat/completions", body).status_code == 200
        tokens = len(server.post("/tokenize", {"messages": HELLO["messages"]}).json()["tokens"])
        text = server.client.get("/metrics").text
        model = '{model_name="small"}'
        assert value(text, "ready") == 1
        assert value(text, f"num_requests_running{model}") == value(text, f"num_requests_waiting{model}") == 0
        read, stored = (value(text, f"{name}_total{model}") for name in ("prompt_tokens", "prefix_cache_hits"))
        assert read + stored == 2 * tokens
        assert value(text, f"generation_tokens_total{model}") == 12
        assert value(text, 'request_success_total{finished_reason="length",model_name="small"}') == 2
        assert value(text, f"num_preemptions_total{model}") == 0
        for name in (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        ):
            assert value(text, f"{name}_count{model}") == 2, name
        assert value(text, f"request_generation_tokens_sum{model}") == 12
        assert 1 <= value(text, f"inter_token_latency_seconds_count{model}") <= 5
        server.until(lambda: value(server.client.get("/metrics").text, 'kv_cache_usage_perc{tier="memory"}') == 0)
        assert value(text, 'kv_bytes{tier="memory"}') == server.llm.report()["gpu_kv_bytes"] > 0


def test_metrics_ask_nothing_of_the_engine_but_the_live_page_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace copies counts from the GPU on the engine's thread."""
    asked: list[str] = []
    trace, report = coattn.LLM.trace, Runtime.report
    monkeypatch.setattr(coattn.LLM, "trace", lambda self: asked.append("trace") or trace(self))
    monkeypatch.setattr(Runtime, "report", lambda self, step: asked.append("report") or report(self, step))
    body = {**HELLO, "max_tokens": 100, "ignore_eos": True}
    with serving() as server:
        server.client.get("/metrics")
        at = server.service.engine.sample
        assert server.post("/v1/chat/completions", body).status_code == 200
        server.until(lambda: server.service.engine.sample is not at)
        server.client.get("/metrics")
        assert asked == []
        server.client.get("/v1/coattn/status")
        assert server.post("/v1/chat/completions", body).status_code == 200
        server.until(lambda: "trace" in asked)


@pytest.mark.parametrize(("method", "lost"), [("full", False), ("streaming", True)])
def test_status_says_what_the_disk_cache_keeps(method: str, lost: bool, tmp_path: Path) -> None:
    with serving(open=lambda: llm(method, disk=tmp_path, disk_memory="1GiB")) as server:
        said = server.client.get("/v1/coattn/status").json()["disk_cache"]
    assert (said["bytes"], said["limit_bytes"]) == (0, 1 << 30)
    assert bool(said["unshared"]) is lost


def test_status_and_live_show_requests_as_they_run(server: Running) -> None:
    found = server.client.get("/v1/coattn/status").json()
    assert (found["method"], found["exact"], found["max_batch"], found["max_length"]) == ("full", True, 4, 256)
    assert found["live"]["state"] == "ready"
    handle = server.llm.submit(prompt(40), None)
    body = {"prompt": prompt(30), "max_tokens": 220, "ignore_eos": True, "stream": True}
    seen = []
    with (
        server.client.stream("POST", "/v1/completions", json=body) as answer,
        server.client.stream("GET", "/v1/coattn/live?rate=10") as events,
    ):
        for line in events.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
                if len(seen) == 3:
                    break
        answer.read()
    handle.cancel()
    live = [each for state in seen for each in state["requests"] if each["prompt_tokens"] == 30]
    assert live
    for each in live:
        assert set(each) == {
            "id", "state", "priority", "age_s", "prompt_tokens", "stored_tokens", "new_tokens", "limit_tokens",
            "preemptions", "kv_bytes", "cells",
        }  # fmt: skip
        assert each["state"] in ("waiting", "reading", "decoding")
        cells = each["cells"]
        if cells is not None:
            assert cells["where"] == "g" * -(-each["stored_tokens"] // 8)
            assert (cells["attended"], cells["attended_from"]) == ("9" * len(cells["where"]), "all")
    assert live[-1]["new_tokens"] >= live[0]["new_tokens"]
    assert any(state["tiers"]["gpu"]["used_bytes"] for state in seen)
    steps = [state["step"] for state in seen if state["step"]]
    assert steps
    assert all(0 <= span["begin"] <= span["end"] <= step["ms"] + 1 for step in steps for span in step["cpu"])
    server.until_idle()


def test_the_dashboard_shows_metrics_that_there_are(server: Running) -> None:
    body = {**HELLO, "max_tokens": 6, "stream": True, "ignore_eos": True}
    assert server.post("/v1/chat/completions", body).status_code == 200
    there = set(re.findall(r"^(coattn:\w+)", server.client.get("/metrics").text, re.M))
    page = Path(__file__).resolve().parents[2] / "docs" / "serving" / "grafana.json"
    used = set(re.findall(r"coattn:\w+", page.read_text()))
    assert len(used) > 12
    assert used <= there


def test_the_schema_is_published(server: Running) -> None:
    found = server.client.get("/openapi.json").json()
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "response_format", "priority"} <= set(chat["properties"])
    assert "$ref" not in json.dumps(found["paths"]["/v1/chat/completions"]["post"]["requestBody"])
    for path, each in found["paths"].items():
        for name in re.findall(r"\{(\w+)\}", path):
            assert name in [one["name"] for one in each["get"]["parameters"]], path
