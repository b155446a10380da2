"""The walk-through of docs/add_a_method.md, run as it is printed: its parts, its rows, its tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method.registry import PARTS
from coattn.method.row import Method, compose
from coattn.method.table import METHODS, find_method
from coattn.parts.call import AttentionCall
from coattn.step.check import check
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Phase, Selection, Step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, mark: str) -> str:
    (found,) = [text for text in blocks(language) if mark in text]
    return str(found)


PAGES = {
    "strided": ("class Strided", "class Seen"),
    "mean_top": ("class MeanTop", "def outputs"),
}
"""By rule: what tells its code and its tests from the other blocks."""


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's parts and rows, registered while a test runs: name -> class."""
    found = {}
    for name, (code, _) in PAGES.items():
        module = ModuleType(f"coattn.parts.select.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(block("python", code), "add_a_method.md", "exec"), module.__dict__)
        (kind,) = [x for x in vars(module).values() if getattr(x, "name", None) == name]
        monkeypatch.setitem(PARTS["select"], name, kind)
        row = eval(block("python", f'    "{name}",\n    cache='), {"Method": Method})
        monkeypatch.setitem(METHODS, row.name, row)
        found[name] = kind
    return found


def page_tests(rule: str) -> dict[str, Callable[..., None]]:
    names: dict[str, Any] = {}
    exec(compile(block("python", PAGES[rule][1]), "add_a_method.md", "exec"), names)
    return {name: test for name, test in names.items() if name.startswith("test_")}


def run(rule: str, name: str) -> None:
    """A test of the page, with every value that it is parametrised with."""
    test = page_tests(rule)[name]
    marks = getattr(test, "pytestmark", [])
    for value in marks[0].args[1] if marks else [None]:
        test(*([] if value is None else [value]))


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in PAGES for name in page_tests(rule)])
def test_the_tests_of_the_page(rule: str, name: str) -> None:
    run(rule, name)


def test_there_are_tests_on_the_page() -> None:
    assert {rule: len(page_tests(rule)) for rule in PAGES} == {"strided": 3, "mean_top": 5}


def _asks_the_host(self: Any, q: Tensor, memory: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(len(q), 2, ids.shape[1]) + float(q.sum())


def _counts_by_the_step(pick: Callable[..., Any]) -> Callable[..., Any]:
    def picked(self: Any, call: AttentionCall) -> Any:
        if max(call.step.lengths) <= self.budget:  # in a capture this is not the length of anybody
            return call.visible
        return pick(self, call)

    return picked


def _drops_dram(pick: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, call: Selection.of(pick(self, call).gpu)


def _takes_all(pick: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, call: call.visible


@pytest.mark.parametrize(
    ("rule", "broken", "how", "test"),
    [
        ("strided", "pick", _drops_dram, "equals_full"),
        ("strided", "pick", _takes_all, "every_nth"),
        ("mean_top", "_scores", lambda old: lambda self, q, memory, ids: -old(self, q, memory, ids), "each_head_picks"),
        ("mean_top", "_scores", lambda old: _asks_the_host, "exactly_the_declared"),
        ("mean_top", "pick", _counts_by_the_step, "a_captured_step"),
        ("mean_top", "pick", lambda old: lambda self, *a: Selection(), "budget_for_everything"),
    ],
)
def test_the_tests_of_the_page_can_fail(
    rule: str, broken: str, how: Callable[..., Any], test: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules[rule], broken, how(getattr(rules[rule], broken)))
    (name,) = [name for name in page_tests(rule) if test in name]
    with pytest.raises(AssertionError):
        run(rule, name)


def test_the_rows_are_what_they_say() -> None:
    verdict = check(METHODS["mean_top"])
    assert not verdict.problems
    assert verdict.equal is not None
    assert 512 - 32 < verdict.own.attended <= 512 < verdict.own.stored
    for place in ("cpu", "pull"):
        verdict = check(replace(METHODS["strided"], executor=place), block=8, window_blocks=2, layers=2)
        assert not verdict.problems
        assert not verdict.exact


def test_a_cache_with_a_dram_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPU memory only"):
        compose(replace(METHODS["mean_top"], cache="tiered", executor="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("executor", ["cpu", "pull"])
def test_the_first_row_runs_on_a_gpu_and_is_not_captured(executor: str) -> None:
    device, row = torch.device("cuda"), replace(METHODS["strided"], executor=executor)
    assert not check(row, block=8, window_blocks=2, device=device).problems
    shape = LayerShape(4, 2, 16, torch.float32, device)
    runtime = Runtime([shape], compose(row), Ledger(), seqs=2, tokens=256, fixed=True)
    assert runtime.uncaptured() == "select 'strided': its class says `capturable = False`"
    runtime.release()


@pytest.mark.gpu
def test_the_second_row_is_captured() -> None:
    device = torch.device("cuda")
    shape = LayerShape(4, 2, 16, torch.float32, device)
    runtime = Runtime([shape], compose(METHODS["mean_top"], budget=64), Ledger(), seqs=2, tokens=256, fixed=True)
    assert runtime.uncaptured() is None
    runtime.groups[0].cache.plan(Step(Phase.DECODE, (), (), ()))  # a table of padding rows alone
    q, k, v = (torch.randn(2, heads, 16, device=device) for heads in (4, 2, 2))
    graph = torch.cuda.CUDAGraph()
    with runtime.capturing(2, host=False):
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
