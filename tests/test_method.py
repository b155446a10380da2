from __future__ import annotations

import pytest

from coattn.errors import ConfigError, MethodError
from coattn.method import Method, compose
from coattn.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_table_fits(name: str) -> None:
    composed = compose(METHODS[name])
    assert composed.exact == (name in ("full", "offload", "cpu"))


def test_every_mismatch_is_named_at_once() -> None:
    row = Method("odd", store="window", select="everything", place=("cpu", "pull"), schedule="layer_ahead")
    with pytest.raises(MethodError) as caught:
        compose(row)
    message = str(caught.value)
    assert "select 'everything' needs a store that keeps every token" in message
    assert "place 'cpu' needs a store with an arena" in message
    assert "place 'pull' needs a store with an arena" in message
    assert "keeps tokens in its GPU tier, which none of its places attends to" in message
    assert "more than one place attends to the arena" in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Method("a", "arena", "everything", ("gpu",), "inline"), "in its arena, which none of its places"),
        (Method("b", "arena", "digest_top", ("gpu", "cpu"), "same_layer"), "needs a store with a digest"),
        (Method("c", "pool", "everything", ("gpu",), "same_layer"), "needs a place that computes on the host"),
        (Method("d", "pool", "sinks_recent", ("gpu",), "inline"), "needs a store that is a window"),
        (Method("e", "pool", "everything", (), "inline"), "names no place"),
    ],
)
def test_rows_that_do_not_fit_are_refused(row: Method, reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        compose(row)


def test_all_missing_parts_are_named() -> None:
    with pytest.raises(MethodError) as caught:
        compose(Method("x", "attic", "everything", ("moon",), "inline"))
    assert "store 'attic'" in str(caught.value)
    assert "place 'moon'" in str(caught.value)
    assert "pool, window, arena" in str(caught.value)


def test_unknown_parameters_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no parameter 'sink'") as caught:
        compose(METHODS["streaming"], sink=4)
    assert "sinks" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("sinks", -1), ("recent", 0), ("block", 0), ("sinks", 1.5), ("sinks", True)]
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is "):
        compose(METHODS["streaming"], **{name: value})


def test_parameters_reach_the_parts() -> None:
    parts = compose(METHODS["streaming"], sinks=4, recent=12).build()
    assert (parts.store.sinks, parts.store.recent) == (4, 12)  # type: ignore[attr-defined]


def test_every_build_is_fresh() -> None:
    composed = compose(METHODS["cpu"])
    assert composed.build().store is not composed.build().store
