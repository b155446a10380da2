from dataclasses import dataclass
from typing import Any

import pytest

from coattn.errors import ConfigError, MethodError
from coattn.method.registry import PARTS, registry
from coattn.method.row import Method, compose, find_parts
from coattn.method.table import METHODS
from coattn.parts.select.everything import Everything


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_table_fits(name: str) -> None:
    composed = compose(METHODS[name])
    assert composed.exact == (name in ("full", "offload", "cpu"))


def test_every_kind_of_work_can_be_named() -> None:
    kinds = {kind for executor in PARTS["executor"].values() for kind in executor.runs}  # type: ignore[attr-defined]
    assert set(registry().work_kinds) == kinds


def test_every_need_has_a_sentence() -> None:
    words = {word for kinds in PARTS.values() for kind in kinds.values() for word in kind.needs}
    assert words == set(registry().needs)


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


def test_all_missing_parts_are_named() -> None:
    with pytest.raises(MethodError) as caught:
        compose(Method("x", "attic", "everything", "moon"))
    assert "cache 'attic'" in str(caught.value)
    assert "executor 'moon'" in str(caught.value)
    assert "gpu, recent, tiered, values, evicting" in str(caught.value)


def test_a_part_may_be_given_as_its_class_or_by_where_its_class_is() -> None:
    rule = PARTS["select"]["everything"]
    for given in (rule, "coattn.parts.select.everything:Everything"):
        composed = compose(Method("mine", "gpu", given))
        assert type(composed.build().select) is rule
    assert Method("mine", "gpu", rule).parts()[2] == ("select", "everything")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (PARTS["select"]["everything"](), "is given as select, but is no part"),
        (PARTS["index"]["none"], "but it is a part for index"),
        ("coattn.parts.select.nowhere:Rule", "cannot be imported: ModuleNotFoundError"),
        ("coattn.units:ceil_div", "is no part"),
    ],
)
def test_what_is_no_part_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        compose(Method("mine", "gpu", given))


def test_a_parameter_belongs_to_one_part() -> None:
    for name, method in METHODS.items():
        names = [parameter for kind in find_parts(method) for parameter in kind.parameters()]
        assert len(names) == len(set(names)), name


def test_a_part_whose_parameter_another_part_has_is_refused() -> None:
    @dataclass
    class Greedy(Everything):
        name = "greedy"
        block: int = 4

    with pytest.raises(MethodError, match="cache 'tiered' and select 'greedy' both have a parameter 'block'"):
        compose(Method("a", "tiered", Greedy, "cpu"))


def test_unknown_parameters_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no parameter 'sink'") as caught:
        compose(METHODS["streaming"], sink=4)
    assert "sinks" in caught.value.hint


def test_parameters_reach_the_parts() -> None:
    parts = compose(METHODS["streaming"], sinks=4, recent=12).build()
    assert (parts.config.sinks, parts.config.recent) == (4, 12)  # type: ignore[attr-defined]


def test_every_build_is_fresh() -> None:
    composed = compose(METHODS["cpu"])
    assert composed.build().config is not composed.build().config
