"""`coattn chat --url` against a server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.cli.run import coattn
from tests.serve.running import Running

from coattn.engine.sampling.params import SamplingParams
from coattn.errors import InputError, UnsupportedError
from coattn.tools.chat.remote import Remote


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that sends each connection the next of these bytes and hangs up -> its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                with listening.accept()[0] as one:
                    one.recv(65536)
                    one.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be reached"),
        (page(b"<html>hello</html>"), "does not answer as OpenAI's API does"),
        (b"HTTP/1.1 401 Unauthorized\\r\\nContent-Length: 0\\r\\n\\r\\n", "Set COATTN_API_KEY"),
        (page(b"[]"), "does not answer as OpenAI's API does"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{", "does not answer as OpenAI's API does"),
    ],
)
def test_something_else_listens_there(answer: bytes, words: str) -> None:
    with answering(answer) as url:
        done = coattn("chat", "--url", url, stdin="hello\n")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert words in done.stderr


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broke off"),
        (page(b'data: {"choices": []}\n'), "broke off"),
        (page(b"data: {nothing\n"), "does not answer as OpenAI's API does"),
        (page(b'data: {"choices": [5]}\n'), "does not answer as OpenAI's API does"),
    ],
)
def test_a_server_that_breaks_off(answer: bytes, words: str) -> None:
    with answering(page(b'{"data": [{"id": "small"}]}'), answer) as url:
        done = coattn("chat", "--url", url, stdin="hello\n")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr


def test_a_key_that_no_header_can_hold(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATTN_API_KEY", "two\nlines")
    done = coattn("chat", "--url", server.url, stdin="hello\n")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2), done.stderr


def test_a_conversation_with_a_server(server: Running) -> None:
    partner = Remote(server.url)
    assert partner.model == "small"
    messages = [{"role": "user", "content": "hello"}]
    text = "".join(partner.answer(messages, SamplingParams(6, 0.0, 1.0)))
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    assert text == server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert partner.stats is not None
    assert (partner.stats.method, partner.stats.new_tokens) == ("full", 6)
    assert partner.stats.kv_bytes["gpu"] > 0
    with pytest.raises(UnsupportedError):
        partner.switch("cpu")
    with pytest.raises(InputError, match="maximum context"):
        list(partner.answer([{"role": "user", "content": "x" * 300}], SamplingParams(6, 0.0, 1.0)))
    with pytest.raises(InputError, match="not served"):
        list(Remote(server.url, model="other").answer(messages, SamplingParams(6, 0.0, 1.0)))


def test_leaving_an_answer_cancels_it(server: Running) -> None:
    before = server.llm.report()["requests"]["cancelled"]
    answer = Remote(server.url + "/v1").answer([{"role": "user", "content": "hi"}], SamplingParams(200, 0.0, 1.0))
    next(iter(answer))
    answer.close()  # type: ignore[attr-defined]
    server.until_idle()
    assert server.llm.report()["requests"]["cancelled"] in (before, before + 1)


def test_the_command(server: Running) -> None:
    done = coattn("chat", "--url", server.url, "--max-new-tokens", "4", "--temperature", "0", stdin="hello\n/stats\n")
    assert done.returncode == 0
    assert "4 written" in done.stderr
    assert len(done.stdout) > 1
