"""What a key may have, when it may come back, and what a server short of memory does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.serve.running import HELLO, Running, serving

from coattn.serve.errors import ApiError
from coattn.serve.limits import LONGEST_S, WINDOW, Limits, Pace
from coattn.serve.settings import Settings

CHAT = "/v1/chat/completions"
LONG = {**HELLO, "max_tokens": 200, "ignore_eos": True}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_the_pace_is_that_of_the_time_with_something_to_do() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.enter(8)
    clock.now += 3
    assert pace.seconds() == 4, "nobody has ended for three seconds"
    for _ in range(4):
        clock.now += 2
        pace.leave()
    assert [pace.seconds(count) for count in (1, 4)] == [int(11 / 4) + 1, 12]
    pace.leave(4)
    clock.now += 10_000
    pace.enter(1)
    assert pace.seconds() == 1, "the time in which nobody asked says nothing"
    pace.enter(200)
    for _ in range(100):
        clock.now += 0.5
        pace.leave()
    assert pace.seconds(20) == int(20 * 0.5 * (WINDOW + 0) / WINDOW) + 1, "the last ones count"
    clock.now += 1e9
    assert pace.seconds() == LONGEST_S


def test_a_key_that_has_had_its_tokens_may_come_back_when_it_is_told() -> None:
    clock = Clock()
    limits = Limits(None, 600, clock)
    limits.check(b"a", 1)
    limits.enter(b"a", 1)
    limits.leave(b"a", 1, 650)
    with pytest.raises(ApiError) as refused:
        limits.check(b"a", 1)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    seconds = int(refused.value.headers["Retry-After"])
    assert seconds == 6, "50 tokens too many, at ten a second, and a moment"
    limits.check(b"b", 1)  # another key has its own
    clock.now += seconds - 1
    with pytest.raises(ApiError):
        limits.check(b"a", 1)
    clock.now += 1
    limits.check(b"a", 1)
    clock.now += 1e6
    limits.enter(b"a", 1)
    limits.leave(b"a", 1, 601)
    with pytest.raises(ApiError, match="tokens a minute"):
        limits.check(b"a", 1)  # what was not used is not saved up


def test_a_machine_short_of_memory_refuses_and_looks_again() -> None:
    clock, free = Clock(), [1 << 30]
    limits = Limits(None, None, clock, lambda: (64 << 30, free[0]))
    limits.check_memory(3)
    free[0] = 100 << 20
    limits.check_memory(3)  # it was looked at just now
    clock.now += 1
    with pytest.raises(ApiError) as refused:
        limits.check_memory(3)
    assert (refused.value.status, refused.value.code, refused.value.headers) == (
        503,
        "memory_short",
        {"Retry-After": "3"},
    )
    clock.now, free[0] = clock.now + 1, 1 << 30
    limits.check_memory(3)


def asked(server: Running, name: str, body: dict[str, object] = HELLO) -> int:
    return server.post(CHAT, body, headers=key(name)).status_code


def test_a_key_has_so_many_answers_at_a_time() -> None:
    settings = Settings(port=0, names=("small",), keys=("alpha", "beta"), key_requests=2)
    with serving(settings, max_length=512) as server, ThreadPoolExecutor(2) as several:
        assert asked(server, "alpha", {**HELLO, "n": 3}) == 400
        running = [several.submit(asked, server, "alpha", {**LONG, "user": str(i)}) for i in range(2)]
        server.until(lambda: len(server.service.engine.calls) == 2)
        refused = server.post(CHAT, HELLO, headers=key("alpha"))
        if len(server.service.engine.calls) == 2:
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
        assert asked(server, "beta") == 200
        assert [each.result() for each in running] == [200, 200]
        assert asked(server, "alpha") == 200, "its answers are done"


def test_a_key_has_so_many_tokens_a_minute_and_streams_count() -> None:
    settings = Settings(port=0, names=("small",), keys=("alpha", "beta"), key_tokens=10)
    with serving(settings) as server:
        with server.client.stream("POST", CHAT, json={**LONG, "stream": True}, headers=key("alpha")) as stream:
            next(stream.iter_lines())
            time.sleep(0.2)
        server.until_idle()  # it was cancelled, and what was computed counts
        refused = server.post(CHAT, HELLO, headers=key("alpha"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert asked(server, "beta") == 200


def test_a_header_says_how_many_were_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_batch=1, max_length=512) as server, ThreadPoolExecutor(3) as several:
        first = server.post(CHAT, HELLO)
        assert first.headers["x-queue-position"] == "0"
        step = server.llm.engine.step

        def slowly() -> bool:
            time.sleep(0.02)
            return step()

        monkeypatch.setattr(server.llm.engine, "step", slowly)
        waiting = []
        for count in range(3):
            waiting.append(several.submit(server.post, CHAT, {**HELLO, "stream": count == 1}))
            server.until(lambda: len(server.llm.engine.inbox) > count)  # noqa: B023
        assert [each.result().headers["x-queue-position"] for each in waiting] == ["0", "1", "2"]


def test_memory_that_is_short_sheds_load_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_length=512) as server, ThreadPoolExecutor(1) as several:
        limits = server.service.app.state.context.limits
        monkeypatch.setattr(limits, "_memory", lambda: (64 << 30, 1 << 20))
        assert server.post(CHAT, HELLO).status_code == 200, "nobody else runs whose end would help"
        running = several.submit(server.post, CHAT, {**LONG, "max_tokens": 400})
        server.until(lambda: len(server.service.engine.calls) == 1)
        refused = server.post(CHAT, HELLO)
        assert running.result().status_code == 200
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_short")
