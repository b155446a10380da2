"""`coattn chat --url` against a server."""

from __future__ import annotations

import pytest
from tests.cli.run import coattn
from tests.serve.running import Running

from coattn.chat.base import Asked
from coattn.chat.remote import Remote
from coattn.errors import InputError, UnsupportedError


def test_a_conversation_with_a_server(server: Running) -> None:
    partner = Remote(server.url)
    assert partner.model == "small"
    messages = [{"role": "user", "content": "hello"}]
    text = "".join(partner.answer(messages, Asked(6, 0.0, 1.0)))
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    assert text == server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert partner.stats is not None
    assert (partner.stats.method, partner.stats.new_tokens) == ("full", 6)
    assert partner.stats.kv_bytes["gpu"] > 0
    with pytest.raises(UnsupportedError):
        partner.switch("cpu")
    with pytest.raises(InputError, match="maximum context"):
        list(partner.answer([{"role": "user", "content": "x" * 300}], Asked(6, 0.0, 1.0)))
    with pytest.raises(InputError, match="not served"):
        list(Remote(server.url, model="other").answer(messages, Asked(6, 0.0, 1.0)))


def test_leaving_an_answer_cancels_it(server: Running) -> None:
    before = server.llm.report()["requests"]["cancelled"]
    answer = Remote(server.url + "/v1").answer([{"role": "user", "content": "hi"}], Asked(200, 0.0, 1.0))
    next(iter(answer))
    answer.close()  # type: ignore[attr-defined]
    server.until_idle()
    assert server.llm.report()["requests"]["cancelled"] in (before, before + 1)


def test_the_command(server: Running) -> None:
    done = coattn("chat", "--url", server.url, "--max-new-tokens", "4", "--temperature", "0", stdin="hello\n/stats\n")
    assert done.returncode == 0
    assert "4 written" in done.stderr
    assert len(done.stdout) > 1
