"""A replica without Ray: the app answers over messages, leaves when told, and says how it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import request_response
from tests.tools.evaluate.tiny import save_model

from coattn.errors import CoattnError, ConfigError, ModelError
from coattn.serve.cluster.affinity import CHAT, TEXT, affinity
from coattn.serve.cluster.options import Options
from coattn.serve.cluster.relay import REPLICA, Forwarded, Message, Relay, Stream
from coattn.serve.cluster.server import Server

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def replica(folder: Path, **more: Any) -> AsyncIterator[Server]:
    made = Server(Options(model=str(folder), device="cpu", max_batch=2, max_length=256, **more), "one")
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """One that takes requests. Its parameter: whether prompts share nothing."""
    async with replica(folder, no_reuse=getattr(request, "param", False)) as made:
        await made.check_health()
        yield made


def post(body: Any, path: str = CHAT, **headers: str) -> Forwarded:
    raw = json.dumps(body).encode()
    given = {"content-type": "application/json", "host": "127.0.0.1", **headers}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    return Forwarded(scope, raw, affinity(path, raw, b""))


async def gather(server: Server, asked: Forwarded) -> tuple[int, dict[bytes, bytes], bytes]:
    lists = [each async for each in server.answer(asked)]
    messages = [message for each in lists for message in each]
    head: Message = messages.pop(0)
    return head["status"], dict(head["headers"]), b"".join(each.get("body", b"") for each in messages)


@pytest.mark.anyio
async def test_answers_and_streams(server: Server) -> None:
    status, headers, raw = await gather(server, post(HELLO))
    assert (status, headers[REPLICA.encode()]) == (200, b"one")
    text = json.loads(raw)["choices"][0]["message"]["content"]
    status, headers, raw = await gather(server, post({**HELLO, "stream": True, "session_id": "talk"}))
    assert headers[b"content-type"].startswith(b"text/event-stream")
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    parts = [choice["delta"].get("content") or "" for each in events for choice in json.loads(each)["choices"]]
    assert "".join(parts) == text


@pytest.mark.anyio
async def test_errors_keep_their_form(server: Server) -> None:
    status, _, raw = await gather(server, post({**HELLO, "temperature": 9}))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "temperature")
    status, _, raw = await gather(server, post(HELLO, host="elsewhere.example"))
    assert (status, json.loads(raw)["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.anyio
async def test_who_leaves_frees_the_engine(server: Server) -> None:
    stream = server.answer(post({**HELLO, "max_tokens": 200, "stream": True}))
    for _ in range(2):
        await anext(stream)
    assert server.engine.llm is not None
    assert server.engine.llm.engine.inbox.live
    await stream.aclose()
    for _ in range(500):
        if not server.engine.calls and not server.engine.llm.engine.inbox.live:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the request still runs")


@pytest.mark.anyio
async def test_health_is_that_of_the_engine(server: Server) -> None:
    server.engine._set("broken", "It fell over.")
    with pytest.raises(RuntimeError, match="It fell over"):
        await server.check_health()
    status, _, raw = await gather(server, post(HELLO))
    assert (status, json.loads(raw)["error"]["code"]) == (503, "broken")
    server.engine._set("ready", "")
    await server.check_health()


@pytest.mark.parametrize("server", [False, True], indirect=True)
@pytest.mark.anyio
async def test_prompts_share_unless_told_not_to(server: Server) -> None:
    ids = {"prompt": list(range(100)), "max_tokens": 1, "ignore_eos": True}
    for _ in range(2):
        _, _, raw = await gather(server, post(ids, TEXT))
    assert (json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is not server.options.no_reuse


@pytest.mark.anyio
async def test_a_model_that_cannot_be_loaded_is_told_by_its_health(tmp_path: Path) -> None:
    async with replica(tmp_path / "nothing") as server:
        with pytest.raises(ModelError):
            await server.check_health()


@pytest.mark.anyio
async def test_a_broken_replica_is_replaced_within_a_request(folder: Path, server: Server) -> None:
    """A relay before two replicas, the first of which has broken."""
    async with replica(folder) as other:
        other.name = "two"
        await other.check_health()
        server.engine._set("broken", "It fell over.")

        async def open(asked: Forwarded) -> Stream:
            async for messages in (other if asked.avoid == "one" else server).answer(asked):
                for message in messages:
                    yield message

        given = post({**HELLO, "stream": True})
        bodies: list[Message] = [{"type": "http.request", "body": given.body, "more_body": False}]

        async def receive() -> Message:
            if not bodies:
                await asyncio.Event().wait()
            return bodies.pop()

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        relay = Relay(server.options.settings(()), open)
        await request_response(relay)(given.scope, receive, send)
        assert (sent[0]["status"], dict(sent[0]["headers"])[REPLICA.encode()]) == (200, b"two")
        assert b"".join(each["body"] for each in sent[1:]).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "given",
    [{"modell": "x"}, {"max_batch": 0}, {"max_batch": "many"}, {"replicas": 0}, {"replicas": [1]}, {"fronts": 0}],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))}"):
        Options.read(given)


@pytest.mark.parametrize("given", [{"method": "nothing"}, {"set": {"nothing": 3}}, {"gpu_kv": "much"}])
def test_options_are_checked_before_anything_is_deployed(given: dict[str, Any]) -> None:
    with pytest.raises(CoattnError):
        Options.read(given)


def test_words_of_a_command_line_are_read_as_numbers() -> None:
    """`serve run module:build max_batch=8` gives strings."""
    found = Options.read({"max_batch": "8", "replicas": "2", "no_key": "true"}).deployment()
    assert (found["max_ongoing_requests"], found["num_replicas"]) == (16, 2)


def test_a_replica_has_what_its_batch_needs_unless_the_file_says_otherwise() -> None:
    made = Options(replicas={"max_replicas": 4}, replica={"max_ongoing_requests": 20}).deployment()
    assert made["autoscaling_config"] == {"target_ongoing_requests": 16, "max_replicas": 4}
    assert (made["max_ongoing_requests"], "num_replicas" in made) == (20, False)
