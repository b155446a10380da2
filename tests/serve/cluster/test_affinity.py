"""Keys of requests: what shares KV shares a key, and nothing tells tenants of each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coattn.serve.cluster.affinity import BORDERS, CHAT, NOWHERE, RESPONSES, TEXT, Affinity, affinity


def of(body: Any, path: str = CHAT, tenant: bytes = b"") -> Affinity:
    return affinity(path, json.dumps(body).encode(), tenant)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def common(one: Affinity, other: Affinity) -> int:
    """Keys that two prompts have in common, which must be the first ones."""
    same = [a == b for a, b in zip(one.prefix, other.prefix, strict=False)]
    assert same == sorted(same, reverse=True)
    assert set(one.prefix) & set(other.prefix) == set(one.prefix[: sum(same)])
    return sum(same)


def test_a_longer_conversation_begins_as_the_shorter_one() -> None:
    first = of({"messages": said("x" * 900)})
    second = of({"messages": said("x" * 900, "and then?")})
    assert len(first.prefix) == 2  # 256 and 512 bytes
    assert common(first, second) == 2


def test_an_input_has_the_keys_of_its_chat() -> None:
    told = [{"role": "system", "content": "be brief"}, *said("x" * 900)]
    chat = of({"messages": told})
    assert len(chat.prefix) == 2
    for given in ({"input": told}, {"input": "x" * 900, "instructions": "be brief"}):
        assert of(given, RESPONSES) == chat


@pytest.mark.parametrize("length", [0, 255, 256, 257, 1023, 1024, 65_535, 65_536, 200_000])
def test_there_is_a_key_at_each_border_that_is_reached(length: int) -> None:
    found = of({"prompt": "a" * length}, TEXT)
    assert len(found.prefix) == sum(border <= length for border in BORDERS)
    assert found.size == min(length, BORDERS[-1])


def test_keys_end_where_texts_part() -> None:
    one, other = ("a" * 700 + letter * 700 for letter in "bc")
    assert common(of({"prompt": one}, TEXT), of({"prompt": other}, TEXT)) == 2
    ids = list(range(400))
    assert common(of({"prompt": [*ids, 1, 1]}, TEXT), of({"prompt": [*ids, 2, 2]}, TEXT)) == 3  # of 1,600 bytes
    assert common(of({"prompt": [[*ids], [7]]}, TEXT), of({"prompt": ids}, TEXT)) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": b"a"}, {"tenant": b"b"}),
        ({"salt": "a"}, {"salt": "b"}),
        ({"tenant": b"a", "salt": "b"}, {"tenant": b"ab"}),
    ],
)
def test_tenants_and_salts_have_no_key_in_common(one: dict[str, Any], other: dict[str, Any]) -> None:
    def keys(tenant: bytes = b"", salt: str | None = None) -> set[str]:
        body = {"messages": said("x" * 3000), "session_id": "talk", "cache_salt": salt}
        return set(of(body, tenant=tenant).keys)

    assert len(keys(**one)) == 5
    assert not keys(**one) & keys(**other)


def test_sessions_are_known_by_their_names() -> None:
    one = of({"messages": said("hello"), "session_id": "a"})
    assert one.session == of({"prompt": "other", "session_id": "a"}, TEXT).session
    assert one.session != of({"messages": said("hello"), "session_id": "b"}).session
    assert one.keys == (one.session,)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [3, null, [1]]}', b"{}"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_cannot_be_read_say_nothing(path: str, raw: bytes) -> None:
    assert not affinity(path, raw, b"").keys


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [None], [[]], [True], [-1], [1 << 70], [1.5], [["x"]], "\ud800", ["x", 3]]
)
def test_prompts_of_any_kind_are_taken(prompt: Any) -> None:
    assert not of({"prompt": prompt, "session_id": 3, "cache_salt": []}, TEXT).keys


def test_other_paths_say_nothing() -> None:
    assert of({"messages": said("x" * 300), "session_id": "a"}, "/tokenize") is NOWHERE
