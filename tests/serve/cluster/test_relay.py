"""A request between client and replicas: what is sent again, what fails, and how that looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.routing import request_response

from coattn.serve.cluster.relay import REPLICA, Forwarded, LostError, Message, Relay, Stream
from coattn.serve.errors import ApiError
from coattn.serve.settings import Settings

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "session_id": "s"}).encode()
FIRST, SECOND, DONE = b'data: {"x": 1}\n\n', b'data: {"x": 2}\n\n', b"data: [DONE]\n\n"
COMMENT = b": prompt 1/2\n\n"
Step = Message | BaseException | float


def start(name: str, status: int = 200, kind: bytes = b"text/event-stream; charset=utf-8") -> Message:
    headers = [(b"content-type", kind), (REPLICA.encode(), name.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def whole(name: str, status: int, code: str) -> list[Step]:
    error = json.dumps(ApiError(status, "No.", code=code).body()).encode()
    return [start(name, status, b"application/json"), body(error, False)]


class Client:
    """What came back of replicas that do as they are told: messages, an error, or seconds to wait."""

    def __init__(self, *replicas: Sequence[Step], leaves: float | None = None):
        self.asked: list[Forwarded] = []
        self.closed = 0
        left = list(replicas)

        async def open(asked: Forwarded) -> Stream:
            self.asked.append(asked)
            try:
                for step in left.pop(0):
                    if isinstance(step, BaseException):
                        raise step
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        yield step
            finally:
                self.closed += 1

        self.status, self.body, self.ended = 0, b"", 0
        asyncio.run(self._run(Relay(Settings(max_body=1000), open), leaves))

    async def _run(self, relay: Relay, leaves: float | None) -> None:
        sent = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.sleep(60 if leaves is None else leaves)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not self.status, "the head was sent twice"
                self.status = message["status"]
            else:
                assert self.status
                assert not self.ended
                self.body += message["body"]
                self.ended += not message.get("more_body", False)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        await request_response(relay)(scope, receive, send)

    @property
    def error(self) -> dict[str, Any]:
        """Of an answer, or of the last event before [DONE]."""
        text = self.body.decode()
        if "data: " in text:
            assert text.endswith("data: [DONE]\n\n")
            text = text.split("data: ")[-2]
        found: dict[str, Any] = json.loads(text)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


GOOD: list[Step] = [start("b"), body(FIRST), body(SECOND), body(DONE), body(b"", False)]


def test_a_stream_is_passed_on() -> None:
    client = Client(GOOD)
    assert (client.status, client.body, client.ended) == (200, FIRST + SECOND + DONE, 1)
    assert client.asked[0].body == BODY
    assert client.asked[0].key


@pytest.mark.parametrize("before", [[], [LostError()]])
def test_a_death_before_an_answer_begins_is_answered_by_another(before: list[Step]) -> None:
    client = Client(before, GOOD)
    assert (client.status, client.body, client.ended) == (200, FIRST + SECOND + DONE, 1)


@pytest.mark.parametrize("begun", [[], [COMMENT], [FIRST]])
def test_a_death_after_the_head_of_a_stream_ends_it_with_an_error(begun: list[bytes]) -> None:
    client = Client([start("a"), *map(body, begun), LostError()], GOOD)
    assert (client.status, client.ended, len(client.asked)) == (200, 1, 1)
    assert client.body.startswith(b"".join(begun))
    assert client.error["code"] == "replica_lost"


def test_a_second_death_is_an_error() -> None:
    client = Client([LostError()], [LostError()], GOOD)
    assert (client.status, client.ended, len(client.asked)) == (503, 1, 2)
    assert client.error["code"] == "replica_lost"


def test_an_answer_that_is_no_stream_is_kept_until_it_is_whole() -> None:
    half = [start("a", 200, b"application/json"), body(b'{"half')]
    made = [start("b", 200, b"application/json"), body(b'{"who', True), body(b'le": 1}', False)]
    client = Client([*half, LostError()], made)
    assert (client.status, client.body, client.ended) == (200, b'{"whole": 1}', 1)
    assert Client(half, made).body == client.body


def test_a_replica_that_takes_no_requests_now_is_avoided() -> None:
    client = Client(whole("a", 503, "broken"), GOOD)
    assert client.body == FIRST + SECOND + DONE
    assert [each.avoid for each in client.asked] == ["", "a"]


def test_the_last_refusal_is_told() -> None:
    client = Client(whole("a", 503, "broken"), whole("b", 503, "draining"))
    assert (client.status, client.error["code"]) == (503, "draining")


@pytest.mark.parametrize("status", [400, 500])
def test_other_errors_are_not_tried_again(status: int) -> None:
    client = Client(whole("a", status, "said"), GOOD)
    assert (client.status, client.error["code"], len(client.asked)) == (status, "said", 1)


@pytest.mark.parametrize(("error", "status", "code"), [
    (ApiError(503, "Too many.", code="queue_full"), 503, "queue_full"),
    (RuntimeError("boom"), 500, "internal_error"),
])  # fmt: skip
def test_what_else_may_go_wrong(error: Exception, status: int, code: str) -> None:
    client = Client([error], GOOD)
    assert (client.status, client.error["code"], len(client.asked)) == (status, code, 1)
    assert Client([start("a"), body(FIRST), error]).error["code"] == code


def test_who_leaves_cancels() -> None:
    client = Client([start("a"), body(FIRST), 30.0], leaves=0.05)
    assert client.closed
    assert not client.ended


def test_a_body_that_is_too_long_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.cluster.test_relay.BODY", b"x" * 2000)
    client = Client()
    assert (client.status, client.error["code"], client.asked) == (413, "body_too_long", [])
