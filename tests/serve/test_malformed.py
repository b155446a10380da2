"""Two hundred ways to ask wrongly: each a 4xx in OpenAI's form, never a traceback, and the next request is answered."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.serve.running import HELLO, Running, serving

from coattn.serve.lifecycle import Protocol
from coattn.serve.settings import Settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "hello"}]
DEEP = "[" * 100_000

BODIES: list[bytes] = [
    *(b"", b" ", b"{", b"}", b"[]", b"null", b"true", b"3", b'"text"', b"NaN", b"{'messages': 1}", b"messages=hello"),
    b'{"messages": [}',
    b'{"messages": [{"role": "user", "content": "x"}]',
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}],}',
    b"\xef\xbb\xbf{}",
    '{"messages": []}'.encode("utf-16"),
    b"\x00" * 100,
    b"\x1f\x8b\x08\x00" + b"x" * 50,
    DEEP.encode(),
    b'{"messages":' + DEEP.encode(),
    b'{"a":' * 50_000,
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
]

WRONG: dict[str, list[Any]] = {
    "model": [3, "other", "", ["small"], True],
    "n": [0, -1, 1.5, "1", True, 65, 10**30, []],
    "stream": ["yes", 1, []],
    "stream_options": [{"include_usage": True}, 3, "x"],
    "max_tokens": [-5, 2.5, "9", 10**9, 10**40, True],
    "max_completion_tokens": [0, -1, "x", 10**9],
    "min_tokens": [-1, 0.5, "x", 300],
    "temperature": [-0.1, 2.1, "hot", True, [], {}],
    "top_p": [-0.1, 1.1, "x", True],
    "top_k": [-2, 1.5, "x", 10**40],
    "min_p": [-0.1, 1.1, "x"],
    "presence_penalty": [-2.1, 2.1, "x", True],
    "frequency_penalty": [-2.1, 2.1, "x", None, []][:3],
    "repetition_penalty": [0, -1, "x", 1e300, 5e-324],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"3": 101}, {"3": "x"}, {"9999999": 1}, {"\u0663": 1}, [], 3, {"1" * 5000: 1}],
    "stop": ["", [""], [3], 3, {}, ["a"] * 17, ["x" * 1001], [None]],
    "stop_token_ids": ["x", [-1], ["a"], [1.5], 3, [10**40]],
    "ignore_eos": ["x", 1],
    "seed": [1.5, "x", 1 << 63, -(1 << 63) - 1],
    "priority": ["x", 1.5, 10**12],
    "timeout_s": [0, -1, "x"],
    "session_id": [3],
    "user": [3],
}
CHATS: dict[str, list[Any]] = {
    "messages": [
        *([], {}, "hello", 3, None, [3], ["hello"], [[]], [{}]),
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "king", "content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": {}}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "x", "name": 3}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *SAID],
        [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, *SAID],
        [{"role": "assistant", "tool_calls": "x"}, *SAID],
        [{"role": "user", "content": "x" * 300}],
        [{"role": "user", "content": "x" * 3_000_000}],
    ],
    "logprobs": [1, "x", []],
    "top_logprobs": [1, -1, 21, "x"],
    "response_format": ["json", {"type": "xml"}, {}, 3, {"type": "json_schema"}],
    "tools": ["x", [3], [{"type": "function"}]],
    "functions": [[{"name": "f"}]],
    "modalities": [["audio"], "text"],
    "audio": [{"voice": "a"}],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [3, {"chat_template": "x"}, {"tokenize": True}, {"messages": []}, {"a-b": 1}],
    "add_generation_prompt": ["x"],
    "continue_final_message": ["x"],
    "prompt_logprobs": [0, 1],
    "bad_words": [["a"]],
    "truncate_prompt_tokens": [3],
    "use_beam_search": [True],
    "allowed_token_ids": [[1]],
    "guided_regex": [3],
    "guided_choice": [["a", 3], 5],
    "guided_json": ["{", 3],
    "guided_grammar": [3],
    "structured_outputs": [3, {"regex": "a", "json": {}}, {"structural_tag": {}}, {"choice": "ab"}],
}
TEXTS: dict[str, list[Any]] = {
    "prompt": [
        *(None, [], [[]], {}, 3, True, "", [""], [1, "a"], ["a", 1], [[1], "a"], [-1], [1.5], [10**12], [260]),
        *([[1, 2], []], "x" * 300, ["x"] * 65, [0] * 256, [True, False]),
    ],
    "echo": ["x"],
    "suffix": ["the end", 3],
    "best_of": [0, 2, "x"],
    "logprobs": [-1, 21, "x", True],
}
TOKENS = [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": 3}),
    ("/tokenize", {"prompt": "a", "messages": SAID}),
    ("/tokenize", {"messages": [{}]}),
    ("/tokenize", {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "a", "model": "other"}),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": "a"}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [260]}),
    ("/detokenize", {"tokens": [1 << 40]}),
]


def cases() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [(CHAT, body) for body in BODIES]
    found.append((CHAT, {"messages": SAID, "max_tokens": 0}))  # a text may be read without an answer
    for name, values in (WRONG | CHATS).items():
        found += [(CHAT, {"messages": SAID, name: value}) for value in values]
    for name, values in (WRONG | TEXTS).items():
        if name != "max_completion_tokens":
            found += [(TEXT, {"prompt": "hello", name: value}) for value in values]
    return found + TOKENS


def check(status: int, body: bytes) -> dict[str, Any]:
    """A 4xx in OpenAI's form."""
    found = json.loads(body)
    assert 400 <= status < 500, body[:300]
    assert status != 422
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["message"].endswith(".")
    assert len(found["error"]["message"]) < 600
    assert "Traceback" not in found["error"]["message"]
    return dict(found["error"])


def test_each_is_refused_and_the_next_is_answered(server: Running) -> None:
    headers = {"content-type": "application/json"}
    for number, (path, body) in enumerate(cases()):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        got = server.client.post(path, content=raw, headers=headers)
        try:
            said = check(got.status_code, got.content)
            if isinstance(body, dict) and path in (CHAT, TEXT) and said["param"] is not None:
                assert said["param"].split(".")[0] in {*body, "max_tokens", "n"}, said
        except AssertionError as error:
            raise AssertionError(f"{path} {raw[:200]!r}: {error}") from error
        if number % 40 == 0:
            assert server.post(CHAT, HELLO).status_code == 200
    assert server.post(CHAT, HELLO).status_code == 200
    server.until_idle()
    assert not server.service.engine.calls


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
        ("GET", "/v1/responses", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/coattn/live?rate=0", 400),
        ("GET", "/v1/coattn/live?rate=nan", 400),
        ("GET", "/v1/coattn/live?rate=fast", 400),
        ("GET", "/docs", 404),
        ("GET", "/" + "x" * 5000, 404),
        ("HEAD", CHAT, 405),
        ("HEAD", "/v1/coattn/live", 405),
    ],
)
def test_places_and_methods_that_are_not_there(server: Running, method: str, path: str, status: int) -> None:
    got = server.client.request(method, path)
    assert got.status_code == status
    if method != "HEAD":
        check(got.status_code, got.content)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "br"}, 415),
        ({"content-type": "application/json", "host": "evil.example"}, 403),
        ({"content-type": "application/json", "host": ""}, 403),
    ],
)
def test_headers(server: Running, headers: dict[str, str], status: int) -> None:
    got = server.client.post(CHAT, content=json.dumps(HELLO).encode(), headers=headers)
    assert got.status_code == status
    check(got.status_code, got.content)


RAW = [
    b"hello\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: weird\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 40_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: raw[:60].decode("latin-1"))
def test_what_is_not_http(server: Running, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.service.port), timeout=5) as line:
        try:
            line.sendall(raw)
            got = _answer(line)
        except (ConnectionResetError, BrokenPipeError):
            got = b""  # it was refused while it was still being sent
    if got:
        head, _, body = got.partition(b"\r\n\r\n")
        check(int(head.split()[1]), body)
    else:
        assert len(raw) > 64 << 10
    assert server.post(CHAT, HELLO).status_code == 200


@pytest.mark.parametrize("cut", [0, 1, 10, 60, 150])
def test_requests_that_break_off(server: Running, cut: int) -> None:
    body = json.dumps(HELLO).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for shut in (True, False):
        with socket.create_connection(("127.0.0.1", server.service.port), timeout=5) as line:
            line.sendall(raw[:cut])
            if shut:
                line.shutdown(socket.SHUT_WR)
                _all(line)
    assert server.post(CHAT, HELLO).status_code == 200
    assert not server.service.engine.calls


def test_bodies_that_are_too_long_or_too_slow() -> None:
    with serving(Settings(port=0, names=("small",), max_body=2000, body_timeout=0.3)) as server:
        long = json.dumps({**HELLO, "x": "y" * 2000}).encode()
        headers = {"content-type": "application/json"}
        for content in (long, iter([long[:500], long[500:]])):
            got = server.client.post(CHAT, content=content, headers=headers)
            assert (got.status_code, check(got.status_code, got.content)["code"]) == (413, "body_too_long")
        with socket.create_connection(("127.0.0.1", server.service.port), timeout=5) as line:
            line.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 90\r\n\r\n{"
            )
            head = line.recv(65536).partition(b"\r\n\r\n")[0]
            assert head.split()[1] == b"408"
        assert server.post(CHAT, HELLO).status_code == 200


@pytest.mark.parametrize(
    ("begun", "later"),
    [(b"", False), (b"POST /v1/ch", False), (b"GET / HTTP/1.1\r\nHost: loc", False), (b"GET /", True)],
)
def test_half_a_request_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch, begun: bytes, later: bool) -> None:
    """later: after a whole request on the same line."""
    monkeypatch.setattr(Protocol, "head_timeout", 0.3)
    with socket.create_connection(("127.0.0.1", server.service.port), timeout=5) as line:
        if later:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert _answer(line).startswith(b"HTTP/1.1 200")
        for byte in begun:  # a little at a time: what counts is when it began
            line.sendall(bytes([byte]))
        assert _all(line).startswith(b"HTTP/1.1 408")
    assert server.post(CHAT, HELLO).status_code == 200


def _answer(line: socket.socket) -> bytes:
    """One response, on a line that may stay open."""
    got = b""
    while part := line.recv(65536):
        got += part
        head, _, body = got.partition(b"\r\n\r\n")
        sizes = [int(each.split(b":")[1]) for each in head.lower().split(b"\r\n") if each.startswith(b"content-length")]
        if sizes and len(body) >= sizes[0]:
            break
    return got


def _all(line: socket.socket) -> bytes:
    parts = []
    while part := line.recv(65536):
        parts.append(part)
    return b"".join(parts)
