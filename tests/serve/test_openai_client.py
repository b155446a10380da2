"""OpenAI's own client, unchanged, gets what the engine gives."""

from __future__ import annotations

import openai
import pytest
from tests.engine.small import END, greedy, prompt
from tests.serve.running import HELLO, Running

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


def test_a_chat_is_answered_as_the_engine_answers_it(client: openai.OpenAI, server: Running) -> None:
    want = server.llm.submit(TALK, greedy(12)).result()
    got = client.chat.completions.create(model="small", messages=TALK, max_completion_tokens=12, temperature=0)
    choice = got.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (want.text, "length", "assistant")
    assert (choice.message.refusal, choice.logprobs, got.object) == (None, None, "chat.completion")
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (want.prompt_tokens, 12)
    assert got.usage.total_tokens == want.prompt_tokens + 12
    assert got.usage.prompt_tokens_details.cached_tokens == 32, "the same was asked before: its full blocks"
    assert got.system_fingerprint.startswith("fp_")
    own = got.model_extra["coattn"]
    assert (own["method"], own["exact"], own["choices"][0]["preemptions"]) == ("full", True, 0)
    assert own["choices"][0]["kv_bytes"]["gpu"] > 0
    assert own["choices"][0]["timings"]["total_ms"] >= own["choices"][0]["timings"]["first_token_ms"] > 0


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="small", messages=TALK, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model="small", messages=TALK, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert next(each for chunk in chunks for each in chunk.choices).delta.role == "assistant"
    text = "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [each.finish_reason for chunk in chunks for each in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_on_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="small", messages=TALK, max_tokens=6, temperature=0, stream=True, stream_options=options, n=2
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_several_choices_differ_by_their_seed_alone(client: openai.OpenAI) -> None:
    def texts(n: int, seed: int) -> list[str | None]:
        asked = {"model": "small", "messages": TALK, "max_tokens": 8, "temperature": 1, "n": n, "seed": seed}
        got = client.chat.completions.create(**asked)
        assert [each.index for each in got.choices] == list(range(n))
        assert got.usage.completion_tokens <= 8 * n
        return [each.message.content for each in got.choices]

    first = texts(3, 7)
    assert len(set(first)) == 3
    assert texts(2, 7) == first[:2]
    assert texts(1, 8) == first[1:2]
    more = {"max_tokens": 8, "temperature": 1, "n": 3, "seed": 7}
    stream = client.chat.completions.create(model="small", messages=TALK, **more, stream=True)
    parts = ["", "", ""]
    for chunk in stream:
        for each in chunk.choices:
            parts[each.index] += each.delta.content or ""
    assert parts == first


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, server: Running, streams: bool) -> None:
    want = server.llm.submit(TALK, greedy(5, logprobs=3)).result()
    ask = {"model": "small", "messages": TALK, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    if streams:
        chunks = client.chat.completions.create(**ask, stream=True)
        found = [one for c in chunks for each in c.choices if each.logprobs for one in each.logprobs.content]
    else:
        found = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [bytes(one.bytes) for one in found] == [bytes([token]) for token in want.token_ids]
    for one, each in zip(found, want.logprobs, strict=True):
        assert one.logprob == pytest.approx(each.logprob, abs=1e-5)
        assert [bytes(top.bytes) for top in one.top_logprobs] == [bytes([token]) for token, _ in each.top]


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_end_an_answer(client: openai.OpenAI, server: Running, streams: bool) -> None:
    text = server.llm.submit(list(b"abc"), greedy(30)).result().text
    stop = text[5:7]
    ask = {"model": "small", "prompt": "abc", "max_tokens": 30, "temperature": 0, "stop": ["never there", stop]}
    if streams:
        chunks = list(client.completions.create(**ask, stream=True))
        got, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**ask).choices[0]
        got, reason = choice.text, choice.finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")


def test_completions_of_texts_and_ids(client: openai.OpenAI, server: Running) -> None:
    texts = ["one", "another one"]
    want = [server.llm.submit(list(text.encode()), greedy(6)).result().text for text in texts]
    for given in (texts, [list(text.encode()) for text in texts]):
        got = client.completions.create(model="small", prompt=given, max_tokens=6, temperature=0, n=2)
        assert [each.text for each in got.choices] == [want[0], want[0], want[1], want[1]]
        assert [each.index for each in got.choices] == [0, 1, 2, 3]
        assert got.usage.prompt_tokens == sum(map(len, texts))
    got = client.completions.create(model="small", prompt=list(b"one"), max_tokens=6, temperature=0, echo=True)
    assert got.choices[0].text == "one" + want[0]
    assert len(client.completions.create(model="small", prompt="one", temperature=0).choices[0].text) > 0


def test_logprobs_of_a_completion(client: openai.OpenAI, server: Running) -> None:
    want = server.llm.submit(prompt(9), greedy(5, logprobs=2)).result()
    got = client.completions.create(model="small", prompt=prompt(9), max_tokens=5, temperature=0, logprobs=2)
    found = got.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([each.logprob for each in want.logprobs], abs=1e-5)
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == 5


def test_an_end_token_is_a_stop(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model="small", messages=TALK, max_tokens=9, temperature=0, logit_bias={str(END): 100}
    )
    assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("", "stop")
    assert got.usage.completion_tokens == 1


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "coattn"
    with pytest.raises(openai.NotFoundError) as told:
        client.chat.completions.create(model="large", messages=TALK)
    assert told.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x" * 300}])
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "messages")
    assert "the server's --max-length" in str(told.value), "what changes it"
    with pytest.raises(openai.BadRequestError, match="10,000"):
        client.completions.create(model="small", prompt="x", max_tokens=10_000)


def test_answers_have_the_published_shape(server: Running) -> None:
    """`post` holds every answer to OpenAI's types; here are those with the most fields."""
    ask = {**HELLO, "logprobs": True, "top_logprobs": 1, "n": 2}
    streamed = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    text = {"prompt": "x", "max_tokens": 2, "logprobs": 1}
    for path, body in (("chat/completions", ask), ("chat/completions", streamed), ("completions", text)):
        got = server.post(f"/v1/{path}", body)
        assert got.status_code == 200
        assert got.text.endswith("data: [DONE]\n\n") == ("stream" in body)
