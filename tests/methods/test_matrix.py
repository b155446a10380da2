"""Every combination of parts: what composes equals full attention with nothing left out, and keeps to its budget."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from coattn.errors import ConfigError, MethodError
from coattn.method.registry import PARTS
from coattn.method.row import Method, compose
from coattn.method.table import METHODS
from coattn.parts.method import AXES
from coattn.step.check import Verdict, check
from coattn.types import Selection, Term

SMALL: dict[str, dict[str, Any]] = {
    "everything": {},
    "maw_threshold": {"block": 8, "window_blocks": 1},
    "oracle": {"budget": 16},
    "random": {"budget": 16},
    "prompt_top": {"budget": 16, "window": 4, "kernel": 3},
    "retrieval_heads": {"block": 8, "sinks": 4, "recent": 12},
    "digest_top": {"budget": 40, "block": 8},
    "alpha_below_max": {"budget": 8, "alpha": 1.0, "dense_layers": 0},
    "code_top": {"sinks": 4, "compress": 0.3},
    "weight_floor": {"quality": 0.8},
    "pq_top_p": {"cap": 8, "tau": 0.5, "block": 8, "centroids": 16},
}
"""By rule: parameters that leave much out of the check's sequences."""
SMALL_CACHE: dict[str, dict[str, Any]] = {
    "gpu": {},
    "recent": {"sinks": 4, "recent": 20},
    "evicting": {"block": 8},
    "tiered": {"window_blocks": 1},
    "values": {"window_blocks": 1},
}
SMALL_UPKEEP: dict[str, dict[str, Any]] = {"heavy_hitters": {"heavy": 0.2, "recent": 6}, "one_set": {"cache_size": 12}}


def fitting() -> Iterator[Method]:
    for kinds in itertools.product(*(PARTS[axis].values() for axis in AXES)):
        provided = frozenset().union(*(kind.provides for kind in kinds))
        if not all(kind.needs <= provided for kind in kinds):
            continue
        names = [kind.name for kind in kinds]
        row = Method(" ".join(names), **dict(zip(AXES, names, strict=True)))
        with suppress(MethodError, ConfigError):
            compose(row)
            yield row


ROWS = list(fitting())


def small(row: Method) -> dict[str, Any]:
    ahead = {"ahead_from": 1} if row.schedule == "layer_ahead" else {}
    return {**SMALL[row.select], **SMALL_CACHE[row.cache], **SMALL_UPKEEP.get(row.maintenance, {}), **ahead}


def checked(row: Method, **more: Any) -> Verdict:
    return check(row, own_tokens=80, whole_tokens=64, layers=2, steps=(9, 3, 2), **{**small(row), **more})


def test_every_part_is_in_some_row() -> None:
    for axis in AXES:
        assert {getattr(row, axis) for row in ROWS} == set(PARTS[axis]), axis


def test_far_more_compose_than_the_table_has() -> None:
    assert len(ROWS) > 10 * len(METHODS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_whatever_composes_is_what_it_says(row: Method, device: torch.device) -> None:
    verdict = checked(row, device=device)
    assert not verdict.problems
    assert verdict.equal is not None, "every part of ours says how it leaves nothing out"
    assert verdict.own.stored > 60
    if verdict.own.most is not None:
        assert verdict.own.attended > 8, "the count counts"
        assert verdict.own.error > 0.1, "a budget that leaves so much out cannot be equal"


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_the_table_are_what_they_say(name: str) -> None:
    row = METHODS[name]
    own = {**({"budget": 80} if name == "scout" else {}), **({"dense_layers": 0} if name == "quest" else {})}
    assert not checked(row, **own).problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Method("a", "values", "everything", "cpu"), "needs an index of codes"),
        (Method("b", "values", "everything", "cpu", index="codes"), "gives entries in DRAM their weights"),
        (Method("c", "tiered", "everything"), "entries in DRAM, which executor 'gpu' does not attend to"),
        (Method("d", "values", "pq_top_p", "pull", index="codes"), "as weighted rows in DRAM, which executor 'pull'"),
        (Method("e", "tiered", "maw_threshold", "cpu"), "maintenance that lists the entries that stay"),
        (Method("f", "gpu", "digest_top", index="digests", maintenance="recall"), "a cache with a DRAM tier"),
        (Method("g", "recent", "oracle"), "keeps every token in GPU memory"),
        (Method("h", "tiered", "everything", "cpu", maintenance="entries", index="averages"), "which entries stay"),
        (Method("i", "tiered", "digest_top", "cpu"), "needs an index of digests"),
        (Method("j", "recent", "digest_top", index="digests"), "keeps keys and values of every token"),
        (Method("k", "gpu", "maw_threshold"), "needs an index of moving averages"),
    ],
)
def test_what_would_be_wrong_is_refused_with_the_reason(row: Method, reason: str) -> None:
    with pytest.raises(MethodError, match=reason):
        compose(row)


def test_a_query_that_is_only_predicted_makes_a_row_inexact() -> None:
    row = Method("ahead", "tiered", "everything", "cpu", "layer_ahead")
    assert not compose(row).exact
    assert not checked(row).problems


def test_a_rule_that_leaves_out_what_it_should_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a rule that drops what lies in DRAM, and says that it is exact."""
    kind = PARTS["select"]["everything"]
    whole = kind.pick  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "pick", lambda *args: Selection.of(whole(*args).gpu))
    problems = check(METHODS["cpu"]).problems
    assert any("says that it is exact" in problem for problem in problems)


def test_work_that_no_executor_runs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PARTS["select"]["everything"]
    whole = kind.pick  # type: ignore[attr-defined]
    unknown = type("Unknown", (Term,), {"kind": "unknown"})(torch.zeros(2, 1, 6, 16), torch.zeros(2, 1, 6))
    monkeypatch.setattr(kind, "pick", lambda *args: Selection((*whole(*args).works, unknown)))
    problems = check(METHODS["cpu"]).problems
    assert any("which none of the row's executors runs" in problem for problem in problems)


def test_a_budget_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PARTS["select"]["oracle"], "most", lambda self: self.budget - 1)
    problems = checked(METHODS["oracle"]).problems
    assert problems == ("a KV head attended to 16 entries; its rule allows 15",)
