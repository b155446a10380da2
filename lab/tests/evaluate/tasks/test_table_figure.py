"""The picture of a table: rows of one size as a list, rows of several sizes over their memory."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot

from coattn_lab.evaluate.tasks.table_figure import figure


def line(row: str, score: float, mode: str, share: float = 0.125) -> dict[str, Any]:
    return {
        "row": row, "mode": mode, "length": 16384, "gpu_share": share, "model": "small", "dtype": "bfloat16",
        "ruler": {"score": score, "score_95": (score - 2, score + 3)},
    }  # fmt: skip


def both(row: str, read: float, fed: float, share: float = 0.125) -> list[dict[str, Any]]:
    return [line(row, read, "read", share), line(row, fed, "fed", share)]


def test_rows_of_one_size_are_listed_from_the_best_with_full_on_top() -> None:
    made = figure(
        [*both("scout", 40, 34), *both("full", 51, 50, 1.0), *both("auto", 50, 47), *both("duo", 47, 60, 1.0)]
    )
    (panel,) = made.axes
    assert [each.get_text() for each in panel.get_yticklabels()] == [
        "scout (12%)", "auto (12%)", "duo (100%)", "full (100%)",
    ]  # fmt: skip
    read, fed = (each.lines[0] for each in panel.containers)
    assert sorted(read.get_xdata()) == [40, 47, 50, 51]
    assert dict(zip(fed.get_xdata(), map(round, fed.get_ydata()), strict=True)) == {34: 0, 47: 1, 60: 2, 50: 3}
    pyplot.close(made)


def test_two_rows_of_a_method_are_told_apart() -> None:
    made = figure([*both("infinigen,alpha=5,budget=9", 9, 8), *both("infinigen,alpha=1000,budget=9", 20, 19)])
    assert [each.get_text() for each in made.axes[0].get_yticklabels()] == [
        "infinigen, alpha=5 (12%)", "infinigen, alpha=1000 (12%)",
    ]  # fmt: skip
    pyplot.close(made)


def test_rows_of_several_sizes_lie_over_their_memory() -> None:
    rows = [*both("full", 51, 50, 1.0), *both("auto,a=1", 50, 47), *both("auto,a=2", 51, 50, 0.25)]
    made = figure(rows)
    assert len(made.axes) == 2
    assert {each.get_xlabel() for each in made.axes} == {"", "KV in GPU memory, of all"}
    points = made.axes[0].containers[0].lines[0]
    assert list(points.get_xdata()) == [0.125, 0.25]
    pyplot.close(made)
