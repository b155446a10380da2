"""Prompts of a server that another process reads: what clients see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.engine.small import llm, prompt
from tests.serve import running
from tests.serve.running import Running
from tests.transfer.local import local

import coattn
from coattn.transfer.decode import RemotePrefill


@pytest.fixture(scope="module")
def reads() -> Iterator[str]:
    with local() as server:
        yield str(server.address)


def serving(address: str, **remote: Any) -> AbstractContextManager[Running]:
    def open_engine() -> coattn.LLM:
        made = llm("scout", budget=80, max_waiting=8)
        RemotePrefill(made, address, **remote).attach()
        return made

    return running.serving(open=open_engine)


def ask(server: Running, ids: list[int], **more: Any) -> Any:
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return server.post("/v1/completions", body)


def test_prompts_are_read_there_and_answered_here(reads: str) -> None:
    with llm("scout", budget=80) as engine:
        want = engine.generate(prompt(150), coattn.SamplingParams(max_new_tokens=6, ignore_eos=True))[0].token_ids
    with serving(reads) as server:
        got = ask(server, prompt(150), n=2).json()
        assert [tuple(each["token_ids"]) for each in got["choices"]] == [want, want]
        assert server.llm.report()["prefill_tokens"] == 0
        assert server.llm.report()["elsewhere_prompts"] == 1
        text = server.client.get("/metrics").text
        for name, count in (("prompts", 1), ("tokens", 150), ("failures", 0)):
            assert f'coattn:remote_prefill_{name}_total{{model_name="small"}} {count}.0' in text
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "session_id": "a"}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        assert server.llm.report()["elsewhere_prompts"] == 1, "a session's turn is read where the session lies"


def test_nobody_there(reads: str) -> None:
    with serving("tcp://127.0.0.1:1") as server:
        assert ask(server, prompt(30)).status_code == 200
        assert server.llm.report()["elsewhere_failed"] == 1
    with serving("tcp://127.0.0.1:1", fallback=False) as server:
        got = ask(server, prompt(30))
        assert (got.status_code, got.json()["error"]["code"]) == (503, "prefill_unavailable")


def test_a_prompt_that_does_not_fit_there_says_so() -> None:
    with (
        local(method="cpu", block=8, host_kv="16 KiB") as reader,
        serving(str(reader.address), fallback=False) as server,
    ):
        got = ask(server, prompt(200))
        assert (got.status_code, got.json()["error"]["code"]) == (400, "memory_budget_exceeded")
        assert "could not read the prompt" in got.json()["error"]["message"]
        server.until_idle()
        assert ask(server, prompt(20)).status_code == 200, "the next one is read there at once"
        assert server.llm.report()["elsewhere_prompts"] == 1


def test_deadlines_hold_while_another_process_reads(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from coattn.transfer import prefill

    hold, real = threading.Event(), prefill.read_prompt

    def slow(*arguments: Any) -> Any:
        hold.wait(20)
        return real(*arguments)

    with serving(reads, lease=1) as server:
        monkeypatch.setattr(prefill, "read_prompt", slow)
        begun = time.monotonic()
        got = ask(server, prompt(30), timeout_s=0.5)
        assert (got.status_code, got.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - begun < 10
        threading.Timer(0.6, hold.set).start()
        timed = ask(server, prompt(40)).json()["coattn"]["choices"][0]["timings"]
        assert timed["first_token_ms"] > 400, "what another process takes counts"
