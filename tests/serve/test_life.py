"""The life of a request: closed sockets, full lines, deadlines, draining, an engine that breaks and comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from tests.engine.small import greedy, llm, prompt
from tests.serve.running import HELLO, Running, serving

from coattn.errors import ModelError
from coattn.serve.lifecycle import Service
from coattn.serve.settings import Settings

LONG = {**HELLO, "max_tokens": 200, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def send(server: Running, body: dict[str, Any]) -> socket.socket:
    """A request over a socket of its own, which is not read from."""
    raw = json.dumps(body).encode()
    made = socket.create_connection(("127.0.0.1", server.service.port), timeout=10)
    made.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return made


def slow(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Steps that take so long."""
    decode = server.llm.runner.decode

    def wait(*args: Any) -> Any:
        time.sleep(seconds)
        return decode(*args)

    monkeypatch.setattr(server.llm.runner, "decode", wait)


def ask_all(server: Running, bodies: list[dict[str, Any]]) -> tuple[list[threading.Thread], list[httpx.Response]]:
    """Clients who ask at once, and the answers that there are."""
    found: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda b=b: found.append(server.post(CHAT, b))) for b in bodies]
    for each in threads:
        each.start()
    return threads, found


def counts(server: Running) -> dict[str, int]:
    return dict(server.llm.report()["requests"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_closed_socket_cancels_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch, streams: bool, half: bool
) -> None:
    slow(server, monkeypatch)
    before, held, free = counts(server), dict(server.llm.ledger.held), dict(server.llm.runner.runtime.free_bytes())
    sockets = [send(server, {**LONG, "stream": streams, "n": 2}) for _ in range(3)]
    scheduler = server.llm.engine.scheduler
    server.until(lambda: len(scheduler.running) == 4 and len(scheduler.waiting) == 2)
    server.until(lambda: all(each.output for each in scheduler.running))
    for each in sockets:
        if half:
            each.shutdown(socket.SHUT_WR)
        else:
            each.close()
    start = time.monotonic()
    server.until_idle()
    assert time.monotonic() - start < 4.0, "long before the answers would have ended"
    assert counts(server)["cancelled"] == before["cancelled"] + 6
    assert not server.service.engine.calls
    assert (dict(server.llm.ledger.held), dict(server.llm.runner.runtime.free_bytes())) == (held, free)
    for each in sockets:
        each.close()
    assert server.post(CHAT, HELLO).status_code == 200


def test_a_full_line_is_a_503_that_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_batch=1, max_waiting=2) as server:
        slow(server, monkeypatch)
        sockets = [send(server, LONG) for _ in range(3)]
        server.until(lambda: server.llm.engine.inbox.room == 0)
        refused = server.post(CHAT, HELLO)
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        assert refused.json()["error"]["code"] == "queue_full"
        sockets[0].close()
        server.until(lambda: server.llm.engine.inbox.room == 1)
        assert server.post(CHAT, {**HELLO, "n": 2}).status_code == 503, "both or none"
        for each in sockets:
            each.close()
        server.until_idle()
        assert server.post(CHAT, {**HELLO, "n": 3}).status_code == 200


def test_more_answers_than_there_will_ever_be_room_for_are_a_400() -> None:
    with serving(max_batch=2, max_waiting=2) as server:
        for path, body in ((CHAT, {**HELLO, "n": 5}), ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2})):
            refused = server.post(path, body)
            assert refused.status_code == 400, path
            error = refused.json()["error"]
            assert error["code"] == "too_many_answers"
            assert "at most 4" in error["message"]
        assert server.post(CHAT, {**HELLO, "n": 4}).status_code == 200


def test_a_session_that_is_still_answering_is_a_409(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_batch=2) as server:
        slow(server, monkeypatch)
        asking = send(server, {**LONG, "session_id": "talk"})
        server.until(lambda: bool(server.llm.engine.scheduler.running))
        refused = server.post(CHAT, {**HELLO, "session_id": "talk"})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "session_busy"
        assert server.post(CHAT, {**HELLO, "session_id": "another"}).status_code == 200
        asking.close()
        server.until_idle()
        assert server.post(CHAT, {**HELLO, "session_id": "talk"}).status_code == 200


def test_deadlines_of_clients_and_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), request_timeout=0.6)) as server:
        assert server.post(CHAT, HELLO).status_code == 200
        slow(server, monkeypatch)
        for more, least in (({"timeout_s": 0.2}, 0.2), ({"timeout_s": 50}, 0.6)):
            start = time.monotonic()
            late = server.post(CHAT, {**LONG, **more})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert least <= time.monotonic() - start < least + 1
        streamed = server.post(CHAT, {**LONG, "stream": True}).text
        events = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
        assert events[-1] == "[DONE]"


def test_a_silent_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), keep_alive=0.1), chunk=16) as server:
        extend = server.llm.runner.extend

        def wait(*args: Any) -> Any:
            time.sleep(0.15)
            return extend(*args)

        monkeypatch.setattr(server.llm.runner, "extend", wait)
        body = {"prompt": "x" * 64, "max_tokens": 1, "ignore_eos": True, "stream": True, "return_progress": True}
        lines = server.post("/v1/completions", body).text.splitlines()
        said = [line for line in lines if line.startswith(":")]
        assert len(said) >= 2
        read = [int(line.removeprefix(": prompt ").partition("/")[0]) for line in said]
        assert read == sorted(read)
        assert read[-1] > 0
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert next(each["prompt_progress"] for each in events if "prompt_progress" in each)["total"] == 64
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_draining_lets_the_running_end_and_takes_nobody_new(monkeypatch: pytest.MonkeyPatch) -> None:
    # a limit that a busy machine does not reach
    with serving(Settings(port=0, names=("small",), drain=60), max_batch=2) as server:
        slow(server, monkeypatch, 0.02)
        bodies = [{**LONG, "max_tokens": 40, "stream": streams} for streams in (True, False, True)]
        threads, found = ask_all(server, bodies)
        server.until(lambda: len(server.llm.engine.inbox.live) == 3)
        server.stop()
        server.until(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/ready").json()["status"] == "draining"
        late = server.post(CHAT, HELLO)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        for each in threads:
            each.join(60)
        assert [each.status_code for each in found] == [200] * 3
        for each in found:
            ended = each.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in each.text
            assert ended or each.json()["choices"][0]["finish_reason"] == "length"
        server.thread.join(10)
        assert server.code == 0


@pytest.mark.parametrize(("drain", "stops"), [(0.3, 1), (60.0, 2)])
def test_draining_ends_at_its_limit_and_a_second_signal_at_once(
    monkeypatch: pytest.MonkeyPatch, drain: float, stops: int
) -> None:
    with serving(Settings(port=0, names=("small",), drain=drain)) as server:
        slow(server, monkeypatch)
        (asks,), found = ask_all(server, [{**LONG, "stream": True}])
        server.until(lambda: bool(server.llm.engine.inbox.live))
        server.until(lambda: server.llm.report()["new_tokens"] > 1)
        start = time.monotonic()
        for _ in range(stops):
            server.stop()
        asks.join(10)
        server.thread.join(10)
        assert time.monotonic() - start < 5
        assert server.code == stops - 1
        assert '"code":"draining"' in found[0].text
        assert found[0].text.endswith("data: [DONE]\n\n")


def test_an_engine_that_breaks_tells_everybody_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = threading.Event()
    opening.set()

    def make() -> Any:
        opening.wait(20)
        return llm(max_waiting=64)

    with serving(Settings(port=0, names=("small",)), make) as server:
        want = server.post(CHAT, HELLO).json()["choices"]
        slow(server, monkeypatch, 0.02)
        threads, found = ask_all(server, [{**LONG, "stream": streams} for streams in (True, False)] * 3)
        server.until(lambda: len(server.llm.engine.inbox.live) == 6 and server.llm.report()["new_tokens"] > 20)

        def fail() -> None:
            raise RuntimeError("a wire came loose")

        opening.clear()
        start = time.monotonic()
        monkeypatch.setattr(server.llm.engine.scheduler, "next", fail)
        for each in threads:
            each.join(10)
        assert time.monotonic() - start < 2
        for each in found:
            assert each.status_code == 500 or '"code":"engine_failure"' in each.text
        server.until(lambda: server.client.get("/ready").status_code == 503, 2)
        assert server.client.get("/ready").json()["status"] == "broken"
        assert server.client.get("/health").status_code == 200
        refused = server.post(CHAT, HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broken")
        opening.set()
        server.until_ready()
        assert server.post(CHAT, HELLO).json()["choices"] == want
        assert "coattn:engine_recoveries_total 1.0" in server.client.get("/metrics").text
    assert server.code == 0


def test_steps_that_fail_one_after_another_are_a_broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        first = server.llm

        def fail(*_: Any) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(first.runner, "extend", fail)
        codes = [server.post(CHAT, HELLO).status_code for _ in range(3)]
        assert codes == [500] * 3
        server.until(lambda: server.llm is not first)
        server.until_ready()
        assert server.post(CHAT, HELLO).status_code == 200


def test_a_step_that_hangs_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Settings(port=0, names=("small",), stall=0.4)) as server:
        assert server.post(CHAT, HELLO).status_code == 200
        decode, let_go = server.llm.runner.decode, threading.Event()

        def hang(*args: Any) -> Any:
            let_go.wait(20)
            return decode(*args)

        monkeypatch.setattr(server.llm.runner, "decode", hang)
        start = time.monotonic()
        told = server.post(CHAT, HELLO)
        assert (told.status_code, told.json()["error"]["code"]) == (500, "engine_failure")
        assert time.monotonic() - start < 2
        assert server.client.get("/ready").json()["status"] == "broken"
        assert server.post(CHAT, HELLO).status_code == 503
        let_go.set()
        server.until_ready()
        server.until_idle()
        assert server.post(CHAT, HELLO).status_code == 200


def test_nothing_is_taken_before_the_model_is_there() -> None:
    go = threading.Event()

    def make() -> Any:
        go.wait(20)
        return llm()

    with serving(Settings(port=0, names=("small",)), make, wait=False) as server:
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/v1/models").json()["data"] == []
        assert server.client.get("/v1/coattn/status").json()["live"]["state"] == "loading"
        assert server.client.get("/metrics").status_code == 200
        early = server.post(CHAT, HELLO)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
        go.set()
        server.until_ready()
        assert server.post(CHAT, HELLO).status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def make() -> Any:
        raise ModelError("There is no such model.", "Choose another.")

    service = Service(Settings(port=0), make)
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(service.run(signals=False))


def test_answers_are_written_while_a_gpu_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step calls back once it is launched; here an ordinary one does, in its place."""
    with serving() as server:
        want = server.post(CHAT, {**HELLO, "max_tokens": 20}).json()["choices"][0]["message"]["content"]
        engine, runner = server.service.engine, server.llm.runner
        decode, flushed = runner.decode, []

        def launch(*args: Any) -> Any:
            assert runner.launched is not None
            flushed.append(len(engine._news))
            runner.launched()
            assert not engine._news
            return decode(*args)

        monkeypatch.setattr(runner, "decode", launch)
        monkeypatch.setattr(server.llm, "not_captured", None)
        for _ in range(2):
            text = server.post(CHAT, {**HELLO, "max_tokens": 20, "stream": True}).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            pieces = [choice["delta"].get("content") or "" for each in events for choice in each["choices"]]
            assert "".join(pieces) == want
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert sum(flushed) == 2 * 19, "each token but the last was held until the next step was launched"


@pytest.mark.gpu
def test_a_captured_step_calls_back_once_it_is_launched() -> None:
    with llm() as engine:
        assert engine.not_captured is None
        calls: list[int] = []
        engine.runner.launched = lambda: calls.append(1)
        engine.generate([prompt(20)], greedy(6, ignore_eos=True))
        assert len(calls) == engine.report()["decode_steps"] > 0
