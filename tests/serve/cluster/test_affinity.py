"""Keys of requests: turns of a conversation share a key, and no two tenants do; and the replicas that keys name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from coattn.serve.cluster.affinity import CHAT, OPENING, RESPONSES, TEXT, affinity, rank


def of(body: Any, path: str = CHAT, tenant: bytes = b"") -> str:
    return affinity(path, json.dumps(body).encode(), tenant)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_longer_conversation_has_the_key_of_the_shorter_one() -> None:
    brief = [{"role": "system", "content": "be brief"}]
    first = of({"messages": [*brief, *said("hello")]})
    assert first == of({"messages": [*brief, *said("hello", "and then?")]})
    assert first != of({"messages": [*brief, *said("good day")]})
    assert of({"input": "hello"}, RESPONSES) == of({"input": "hello"}, RESPONSES) != of({"input": "x"}, RESPONSES)


@pytest.mark.parametrize("unit", ["a", [7]])
def test_prompts_that_begin_alike_have_one_key(unit: Any) -> None:
    whole = of({"prompt": unit * OPENING}, TEXT)
    assert whole == of({"prompt": unit * (OPENING + 1)}, TEXT) == of({"prompt": [unit * OPENING, unit]}, TEXT)
    assert whole != of({"prompt": unit * (OPENING - 1)}, TEXT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": b"a"}, {"tenant": b"b"}),
        ({"salt": "a"}, {"salt": "b"}),
        ({"tenant": b"a", "salt": "b"}, {"tenant": b"ab"}),
    ],
)
@pytest.mark.parametrize("session", [None, "talk"])
def test_tenants_and_salts_have_no_key_in_common(one: Any, other: Any, session: str | None) -> None:
    def key(tenant: bytes = b"", salt: str | None = None) -> str:
        return of({"messages": said("hello"), "session_id": session, "cache_salt": salt}, tenant=tenant)

    assert key(**one) == key(**one) != key(**other)


def test_sessions_are_known_by_their_names() -> None:
    one = of({"messages": said("hello"), "session_id": "a"})
    assert one == of({"prompt": "other", "session_id": "a"}, TEXT)
    assert one != of({"messages": said("hello"), "session_id": "b"})


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_cannot_be_read_say_nothing(path: str, raw: bytes) -> None:
    assert affinity(path, raw, b"") == ""


@pytest.mark.parametrize(
    "given", [None, 3, [], {}, [None], [[]], [True], [1 << 70], [1.5], [["x"]], "\ud800", ["x", 3]]
)
def test_values_of_any_kind_are_taken(given: Any) -> None:
    """Whatever is wrong with them, the replica says it."""
    for body, path in (
        ({"prompt": given}, TEXT),
        ({"messages": given, "tools": given}, CHAT),
        ({"input": given}, RESPONSES),
    ):
        assert len(of({**body, "cache_salt": given}, path)) in (0, 64)


def test_other_paths_say_nothing() -> None:
    assert of({"messages": said("hello"), "session_id": "a"}, "/tokenize") == ""


def test_keys_are_spread_and_only_those_of_a_lost_replica_move() -> None:
    first = [rank(str(i), "abc") for i in range(300)]
    assert first == [rank(str(i), "cba") for i in range(300)]
    assert min(Counter(names[0] for names in first).values()) > 70
    for i, names in enumerate(first):
        names.remove("c")
        assert rank(str(i), "ab") == names
