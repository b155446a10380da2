"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

from coattn.serve.cluster.affinity import Affinity, Candidate, rank


def replicas(**loads: int) -> list[Candidate]:
    return [Candidate(name, load, 32) for name, load in loads.items()]


def session(i: int) -> Affinity:
    return Affinity(session=f"session-{i}")


def prompt(*keys: str) -> Affinity:
    """Just long enough for its keys."""
    return Affinity(prefix=keys, size=256 << (len(keys) - 1))


def test_a_session_waits_for_its_replica_however_busy_that_is() -> None:
    for home in "ab":
        assert rank(session(0), replicas(a=32, b=32), {"session-0": home}) == [[home]]


def test_a_session_goes_elsewhere_when_its_replica_is_gone_or_failed_it() -> None:
    places = {"session-0": "a"}
    assert rank(session(0), replicas(b=3), places) == [["b"]]
    assert rank(session(0), replicas(a=0, b=9), places, avoid=["a"]) == [["b"]]
    assert rank(session(0), replicas(a=0), places, avoid=["a"]) == [["a"]]  # there is no other


def test_new_sessions_are_spread_and_every_router_agrees() -> None:
    nodes = replicas(a=0, b=0, c=0)
    first = [rank(session(i), nodes, {})[0][0] for i in range(300)]
    assert first == [rank(session(i), nodes[::-1], {})[0][0] for i in range(300)]
    assert min(Counter(first).values()) > 70
    fewer = [rank(session(i), nodes[:2], {})[0][0] for i in range(300)]
    assert all(now == before for now, before in zip(fewer, first, strict=True) if before != "c")


def test_a_prompt_goes_where_most_of_it_is() -> None:
    places = {"k1": "a", "k2": "a", "k3": "b"}
    assert rank(prompt("k1", "k2", "k3"), replicas(a=0, b=3), places) == [["b"], ["a"]]
    assert rank(prompt("k1", "k2", "x3"), replicas(a=3, b=0), places) == [["a"], ["b"]]


def test_a_short_beginning_in_common_does_not_gather_all_prompts_in_one_place() -> None:
    places = {"k1": "a", "k2": "a"}
    found = Counter(
        rank(prompt("k1", "k2", *(f"{i}-{n}" for n in range(5))), replicas(a=0, b=0), places)[0][0] for i in range(100)
    )
    assert min(found.values()) > 20


def test_a_replica_that_is_much_busier_is_passed_over() -> None:
    places = {"k1": "a"}
    assert rank(prompt("k1"), replicas(a=8, b=0), places)[0] == ["a"]
    assert rank(prompt("k1"), replicas(a=9, b=0), places)[0] == ["b"]
    assert rank(prompt("k1"), replicas(a=32, b=24), places)[0] == ["a"]


def test_what_has_no_key_goes_to_anyone() -> None:
    assert rank(Affinity(), replicas(a=5, b=0), {}) == [["a", "b"]]
    assert rank(Affinity(), [], {}) == []
    assert rank(session(1), [], {}) == []
