from __future__ import annotations

import pytest

from coattn.errors import ConfigError, MethodError
from coattn.method.registry import PARTS
from coattn.method.row import WHERE, Method, compose
from coattn.method.table import METHODS
from coattn.types import KINDS


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_table_fits(name: str) -> None:
    composed = compose(METHODS[name])
    assert composed.exact == (name in ("full", "offload", "cpu"))


def test_every_kind_of_work_can_be_named() -> None:
    assert set(WHERE) == set(KINDS)


def test_every_mismatch_is_named_at_once() -> None:
    row = Method("odd", cache="recent", select="pq_top_p", executor="cpu", index="averages", maintenance="recall")
    with pytest.raises(MethodError) as caught:
        compose(row)
    message = str(caught.value)
    assert "index 'averages' needs a cache with a DRAM tier" in message
    assert "index 'averages' needs a cache that keeps keys and values of every token" in message
    assert "select 'pq_top_p' needs an index of codes" in message
    assert "maintenance 'recall' needs an index of digests" in message
    assert "maintenance 'recall' needs a selection rule that picks blocks by digests" in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Method("a", "tiered", "everything"), "entries in DRAM, which executor 'gpu' does not attend to"),
        (Method("b", "tiered", "digest_top", "cpu"), "needs an index of digests"),
        (Method("c", "recent", "digest_top", index="digests"), "keeps keys and values of every token"),
        (Method("d", "gpu", "maw_threshold"), "needs an index of moving averages"),
    ],
)
def test_rows_that_do_not_fit_are_refused(row: Method, reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        compose(row)


def test_all_missing_parts_are_named() -> None:
    with pytest.raises(MethodError) as caught:
        compose(Method("x", "attic", "everything", "moon"))
    assert "cache 'attic'" in str(caught.value)
    assert "executor 'moon'" in str(caught.value)
    assert "gpu, recent, evicting, tiered" in str(caught.value)


def test_a_part_that_is_an_object_is_refused() -> None:
    rule = PARTS["select"]["everything"]
    for given in (rule, rule()):
        with pytest.raises(MethodError, match="as select, but a part is given by its name") as caught:
            compose(Method("mine", "gpu", given))  # type: ignore[arg-type]
        assert "PARTS['select']" in caught.value.hint


def test_a_parameter_belongs_to_one_part() -> None:
    for name, method in METHODS.items():
        kinds = [PARTS[axis][part] for axis, part in method.parts()]
        names = [parameter for kind in kinds for parameter in kind.parameters()]
        assert len(names) == len(set(names)), name


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
    assert (parts.config.sinks, parts.config.recent) == (4, 12)  # type: ignore[attr-defined]


def test_every_build_is_fresh() -> None:
    composed = compose(METHODS["cpu"])
    assert composed.build().config is not composed.build().config
