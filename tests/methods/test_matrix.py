"""Every combination of parts: what composes equals full attention with nothing left out, and keeps to its budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from coattn.check import check
from coattn.errors import ConfigError, MethodError
from coattn.method import Method, compose
from coattn.methods import METHODS
from coattn.parts import PARTS

SMALL: dict[str, dict[str, Any]] = {
    "everything": {},
    "sinks_recent": {"sinks": 4, "recent": 20},
    "average_weight": {"block": 8, "window_blocks": 1},
    "top_weight": {"block": 8, "window_blocks": 1},
    "oracle": {"budget": 16},
    "random": {"budget": 16},
    "digest_top": {"budget": 40, "block": 8, "window_blocks": 1},
    "pq_top_p": {"cap": 8, "tau": 0.5, "block": 8, "window_blocks": 1, "centroids": 16},
}
"""By rule: parameters that leave much out of the check's sequences."""


def combinations() -> Iterator[Method]:
    places = [some for n in range(1, 6) for some in itertools.combinations(PARTS["place"], n)]
    for store, select, schedule in itertools.product(*(PARTS[axis] for axis in ("store", "select", "schedule"))):
        for place in places:
            yield Method(f"{store} {select} {'+'.join(place)} {schedule}", store, select, place, schedule)


def fitting() -> list[Method]:
    found = []
    for row in combinations():
        try:
            compose(row)
        except (MethodError, ConfigError):
            continue
        found.append(row)
    return found


ROWS = fitting()


def test_rules_and_stores_are_all_in_some_row() -> None:
    assert {row.store for row in ROWS} == set(PARTS["store"])
    assert {row.select for row in ROWS} == set(PARTS["select"])
    assert {row.schedule for row in ROWS} == set(PARTS["schedule"])
    assert {name for row in ROWS for name in row.place} == set(PARTS["place"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_whatever_composes_is_what_it_says(row: Method, device: torch.device) -> None:
    verdict = check(row, device=device, **SMALL[row.select])
    assert not verdict.problems
    assert verdict.equal is not None, "every part of ours says how it leaves nothing out"
    assert verdict.own.stored > 150
    if verdict.own.most is not None:
        assert verdict.own.attended > 8, "the count counts"
        assert verdict.own.error > 0.1, "a budget that leaves so much out cannot be equal"


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_the_table_are_what_they_say(name: str) -> None:
    row = METHODS[name]
    params = SMALL[row.select]
    own = {**({"budget": 80} if name == "scout" else {}), **({"dense_layers": 0} if name == "quest" else {})}
    assert not check(row, **{**params, **own}).problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Method("a", "contextual", "everything", ("gpu", "cpu"), "same_layer"), "a rule that says which entries stay"),
        (Method("b", "contextual", "random", ("gpu", "cpu"), "same_layer"), "every token in GPU memory"),
        (Method("c", "coded", "everything", ("gpu", "cpu_values"), "inline"), "gives entries in DRAM their weights"),
        (Method("d", "arena", "oracle", ("gpu", "cpu"), "same_layer"), "every token in GPU memory"),
        (Method("e", "residents", "random", ("gpu", "cpu"), "same_layer"), "every token in GPU memory"),
        (Method("f", "coded", "pq_top_p", ("gpu", "cpu_values"), "inline"), "as 'tail', which none of its places"),
    ],
)
def test_what_would_be_wrong_is_refused_with_the_reason(row: Method, reason: str) -> None:
    with pytest.raises(MethodError, match=reason.replace("a rule that", "a selection rule that")):
        compose(row)


def test_a_row_without_a_tail_needs_no_place_for_it() -> None:
    row = Method("f", "coded", "pq_top_p", ("gpu", "cpu_values"), "inline", params={"tail": "renormalise"})
    assert not check(row, **SMALL["pq_top_p"]).problems


def test_a_query_that_is_only_predicted_makes_a_row_inexact() -> None:
    row = Method("ahead", "arena", "everything", ("gpu", "cpu"), "layer_ahead")
    assert not compose(row).exact
    assert not check(row).problems


def test_a_rule_that_leaves_out_what_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a rule that drops what lies far, and says that it is exact."""
    kind = PARTS["select"]["everything"]
    whole = kind.pick  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "pick", lambda *args: replace(whole(*args), far=None))
    problems = check(METHODS["cpu"]).problems
    assert any("says that it is exact" in problem for problem in problems)


def test_a_part_of_a_selection_that_no_place_runs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PARTS["select"]["everything"]
    whole = kind.pick  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "pick", lambda *args: replace(whole(*args), tail=torch.zeros(2, 6)))
    problems = check(METHODS["cpu"]).problems
    assert any("which none of the row's places attends to" in problem for problem in problems)


def test_a_budget_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PARTS["select"]["oracle"], "most", lambda self: self.budget - 1)
    problems = check(METHODS["oracle"], budget=16).problems
    assert problems == ("a KV head attended to 16 entries; its rule allows 15",)
