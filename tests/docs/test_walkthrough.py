"""The walk-through of docs/add_a_method.md, run as it is printed: its part, its row, its tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.check import check
from coattn.method import Method, compose
from coattn.methods import METHODS, find_method
from coattn.parts import PARTS
from coattn.runtime import Runtime
from coattn.store.ledger import Ledger
from coattn.types import LayerShape, Phase, Selection, Step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, mark: str) -> str:
    (found,) = [text for text in blocks(language) if mark in text]
    return str(found)


@pytest.fixture
def mean_top(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's part and row, registered while a test runs."""
    module = ModuleType("coattn.select.mean_top")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block("python", "class MeanTop"), "add_a_method.md", "exec"), module.__dict__)
    monkeypatch.setitem(PARTS["select"], "mean_top", module.MeanTop)
    row = eval(block("python", '    "mean_top",\n    store='), {"Method": Method})
    monkeypatch.setitem(METHODS, row.name, row)
    return module


def page_tests() -> dict[str, Callable[..., None]]:
    names: dict[str, Any] = {}
    exec(compile(block("python", "def outputs"), "add_a_method.md", "exec"), names)
    return {name: test for name, test in names.items() if name.startswith("test_")}


def run(name: str) -> None:
    """A test of the page, with every value that it is parametrised with."""
    test = page_tests()[name]
    marks = getattr(test, "pytestmark", [])
    for value in marks[0].args[1] if marks else [None]:
        test(*([] if value is None else [value]))


@pytest.mark.parametrize("name", page_tests())
def test_the_tests_of_the_page(name: str, mean_top: ModuleType) -> None:
    run(name)


def test_there_are_tests_on_the_page() -> None:
    assert len(page_tests()) == 5


def _asks_the_host(self: Any, q: Tensor, memory: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(len(q), 2, ids.shape[1]) + float(q.sum())


def _counts_by_the_step(pick: Callable[..., Any]) -> Callable[..., Any]:
    def picked(self: Any, layer: int, q: Tensor, store: Any, step: Step) -> Any:
        if max(step.lengths) <= self.budget:  # in a capture this is not the length of anybody
            return store.view(layer, step)
        return pick(self, layer, q, store, step)

    return picked


@pytest.mark.parametrize(
    ("broken", "how", "test"),
    [
        ("_scores", lambda old: lambda self, q, memory, ids: -old(self, q, memory, ids), "each_head_picks"),
        ("_scores", lambda old: _asks_the_host, "exactly_the_declared"),
        ("pick", _counts_by_the_step, "a_captured_step"),
        ("pick", lambda old: lambda self, *a: Selection(), "budget_for_everything"),
    ],
)
def test_the_tests_of_the_page_can_fail(
    broken: str, how: Callable[..., Any], test: str, mean_top: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean_top.MeanTop, broken, how(getattr(mean_top.MeanTop, broken)))
    (name,) = [name for name in page_tests() if test in name]
    with pytest.raises(AssertionError):
        run(name)


def test_the_row_is_what_it_says(mean_top: ModuleType) -> None:
    verdict = check(METHODS["mean_top"])
    assert not verdict.problems
    assert verdict.equal is not None
    assert 512 - 32 < verdict.own.attended <= 512 < verdict.own.stored


@pytest.mark.gpu
def test_the_row_is_captured(mean_top: ModuleType) -> None:
    device = torch.device("cuda")
    shape = LayerShape(4, 2, 16, torch.float32, device)
    runtime = Runtime([shape], compose(METHODS["mean_top"], budget=64), Ledger(), seqs=2, tokens=256, fixed=True)
    assert runtime.uncaptured() is None
    runtime.write_tables(Step(Phase.DECODE, (), (), ()))
    q, k, v = (torch.randn(2, heads, 16, device=device) for heads in (4, 2, 2))
    graph = torch.cuda.CUDAGraph()
    with runtime.capturing(2, far=False):
        runtime.attend(0, q, k, v, 0.25)
        with torch.cuda.graph(graph):
            captured = runtime.attend(0, q, k, v, 0.25)
    runtime.begin(Step.of((0, 1), (0, 0), (200, 90)))
    runtime.attend(0, *(torch.randn(290, heads, 16, device=device) for heads in (4, 2, 2)), 0.25)
    runtime.commit()
    step = Step.of((0, 1), (200, 90), (1, 1))
    runtime.begin(step)
    graph.replay()
    torch.testing.assert_close(captured, runtime.attend(0, q, k, v, 0.25), atol=1e-4, rtol=1e-4)


def test_the_row_of_the_page_fits(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "recent-on-gpu"))
    composed = compose(find_method(f"{path}:recent-on-gpu"))
    assert composed.exact
    assert composed.params["window_blocks"] == 8


def test_the_refusal_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "method.mine"))
    code = "from coattn.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "methods", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == block("text", "does not fit")
