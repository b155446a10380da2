"""The walk-through of docs/add_a_method.md, run as it is printed: its packages, its rows, its tests."""

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.run import coattn
from tests.engine.small import greedy, llm, prompt
from tests.method.packages import install
from tests.test_padding import Stays

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method.registry import GROUP, registry
from coattn.method.row import compose
from coattn.method.table import METHODS, find_method
from coattn.parts.call import AttentionCall
from coattn.step.check import check
from coattn.step.layer_group import LayerGroup
from coattn.step.running import RunningStep
from coattn.step.runtime import Runtime
from coattn.types import BlockList, LayerShape, Phase, Step

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("add_a_method", "add_a_part"))
SHAPE = LayerShape(q_heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))


def block(language: str, mark: str) -> str:
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if mark in text]
    return str(found)


PROJECT, STRIDED, TESTS = block("toml", "[project]"), block("python", "class Strided"), block("python", "def test_")
MEAN_TOP = block("python", "class MeanTop")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both packages of the page, installed."""
    return install_both(tmp_path, monkeypatch)


def install_both(folder: Path, monkeypatch: pytest.MonkeyPatch, strided: str = STRIDED, mean: str = MEAN_TOP) -> Path:
    project = tomllib.loads(PROJECT)["project"]
    assert project["entry-points"][GROUP] == {"strided": "coattn_strided"}
    install(folder, project["name"], strided, monkeypatch)
    install(folder, "coattn-mean-top", mean, monkeypatch)
    assert not registry().failures
    return folder


def page_tests() -> dict[str, Callable[[], None]]:
    names: dict[str, Any] = {}
    exec(compile(TESTS, "test_strided.py", "exec"), names)
    return {name: test for name, test in names.items() if name.startswith("test_")}


def test_what_a_reader_writes_is_short() -> None:
    own = [line for text in (PROJECT, STRIDED, TESTS) for line in text.splitlines() if line.strip()]
    assert len(own) < 60


@pytest.mark.usefixtures("packages")
def test_the_tests_of_the_page_pass() -> None:
    assert len(page_tests()) == 2
    for test in page_tests().values():
        test()


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("Selection.of(visible.gpu, self.every(visible.host))", "Selection.of(visible.gpu)", "equals_full"),
        (":: self.stride]", ":]", "every_third"),
        ("(block * self.stride)", "block", "every_third"),
    ],
)
def test_the_tests_of_the_page_can_fail(
    old: str, new: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in STRIDED
    install_both(tmp_path, monkeypatch, strided=STRIDED.replace(old, new))
    (name,) = [name for name in page_tests() if test in name]
    with pytest.raises(AssertionError):
        page_tests()[name]()


@pytest.mark.usefixtures("packages")
def test_the_rows_are_what_they_say() -> None:
    verdict = check(METHODS["mean_top"])
    assert not verdict.problems
    assert verdict.equal is not None
    assert 512 - 32 < verdict.own.attended <= 512 < verdict.own.stored
    for executor in ("cpu", "pull"):
        verdict = check(replace(METHODS["strided"], executor=executor), block=8, window_blocks=2, layers=2)
        assert not verdict.problems
        assert verdict.whole["stride"] == 1
        assert not verdict.exact


@pytest.mark.usefixtures("packages")
def test_the_rows_answer_in_an_engine() -> None:
    wanted = llm("full").generate([prompt(60)], greedy(6))[0].token_ids
    for row, exact in (("strided", {"stride": 1, "window_blocks": 2}), ("mean_top", {"budget": 256})):
        with llm(row, **exact) as engine:
            assert engine.generate([prompt(60)], greedy(6))[0].token_ids == wanted


@pytest.mark.usefixtures("packages")
def test_a_stride_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        compose(METHODS["strided"], stride=0)
    with pytest.raises(ConfigError, match="at least 8"):
        compose(METHODS["mean_top"], budget=7, block=8)


def start(method: str, **params: int) -> Runtime:
    """Two sequences of 100 and 37 random tokens, the same for every method, of four; a block for padding rows."""
    torch.manual_seed(0)
    composed = compose(METHODS[method], **params)
    runtime = Runtime([SHAPE], composed, Ledger(), seqs=4, tokens=160, fixed=True, padding=True)
    running = runtime.begin(Step.of((0, 1), (0, 0), (100, 37)))
    runtime.attend(running, 0, *(torch.randn(137, heads, 16) for heads in (4, 2, 2)), 0.25)
    runtime.commit(running)
    return runtime


def outputs(method: str, rows: int = 2, **params: int) -> list[torch.Tensor]:
    """30 decode steps; with more rows than sequences as they are captured, over padding rows."""
    runtime, found, lengths = start(method, **params), [], (100, 37)
    for _ in range(30):
        step = Step.of((0, 1), lengths, (1, 1))
        q, k, v = (torch.randn(2, heads, 16) for heads in (4, 2, 2))
        running = runtime.begin(step)
        if rows == 2:
            found.append(runtime.attend(running, 0, q, k, v, 0.25))
        else:
            q, k, v = (torch.cat([x, torch.ones(rows - 2, *x.shape[1:])]) for x in (q, k, v))
            capture = runtime.begin_capture(rows, host=False)
            found.append(runtime.attend(capture, 0, q, k, v, 0.25)[:2])
        runtime.commit(running)
        lengths = step.lengths
    return found


def pick(group: LayerGroup, q: torch.Tensor, running: RunningStep) -> BlockList:
    call = AttentionCall(0, SHAPE, q, 0.25, running.step, group.cache, group.index, running.tables[0])
    found = group.select.pick(call).gpu
    assert found is not None
    return found


@pytest.mark.usefixtures("packages")
def test_a_budget_for_everything_equals_full() -> None:
    torch.testing.assert_close(outputs("mean_top", budget=160, block=8), outputs("full"))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("budget", [8, 24, 47, 160])
def test_attends_to_exactly_the_declared_blocks(budget: int) -> None:
    runtime = start("mean_top", budget=budget, block=8)
    step = Step.of((0, 1), (100, 37), (1, 1))
    running = runtime.begin(step)
    with Stays():
        found = pick(runtime.groups[0], torch.randn(2, 1, 4, 16), running)
    # 101 and 38 tokens: 13 and 5 blocks, of which the newest, with 5 and 6 tokens, is always attended
    counts = [min(budget // 8, 13), min(budget // 8, 5)]
    assert found.tokens.tolist() == [[8 * counts[0] - 3] * 2, [8 * counts[1] - 2] * 2]
    for row in (0, 1):
        newest = runtime.groups[0].cache.gpu.table.owned[row][-1]
        assert set(found.table[row, :, counts[row] - 1].tolist()) == {newest}


@pytest.mark.usefixtures("packages")
def test_each_head_picks_the_block_that_fits_its_query() -> None:
    runtime = start("mean_top", budget=16, block=8)
    step, gpu = Step.of((0, 1), (100, 37), (1, 1)), runtime.groups[0].cache.gpu
    running = runtime.begin(step)
    wanted = [gpu.table.owned[0][7], gpu.table.owned[0][2]]  # of KV head 0 and 1, in the first sequence
    q = torch.zeros(2, 1, 4, 16)
    for head, number in enumerate(wanted):
        gpu.memory[0][number, head, 0] = 10.0
        q[0, 0, 2 * head : 2 * head + 2] = 1.0
    assert pick(runtime.groups[0], q, running).table[0, :, 0].tolist() == wanted


@pytest.mark.usefixtures("packages")
def test_a_captured_step_is_the_same_step() -> None:
    captured = outputs("mean_top", 4, budget=24, block=8)
    torch.testing.assert_close(outputs("mean_top", budget=24, block=8), captured)


@pytest.mark.gpu
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("executor", ["cpu", "pull"])
def test_the_first_row_runs_on_a_gpu_and_is_not_captured(executor: str) -> None:
    device, row = torch.device("cuda"), replace(METHODS["strided"], executor=executor)
    assert not check(row, block=8, window_blocks=2, device=device).problems
    shape = LayerShape(4, 2, 16, torch.float32, device)
    runtime = Runtime([shape], compose(row), Ledger(), seqs=2, tokens=256, fixed=True)
    assert runtime.uncaptured() == "select 'strided': its class says `capturable = False`"
    runtime.release()


@pytest.mark.gpu
@pytest.mark.usefixtures("packages")
def test_the_second_row_is_captured() -> None:
    device = torch.device("cuda")
    shape = LayerShape(4, 2, 16, torch.float32, device)
    runtime = Runtime([shape], compose(METHODS["mean_top"], budget=64), Ledger(), seqs=2, tokens=256, fixed=True)
    assert runtime.uncaptured() is None
    runtime.groups[0].cache.plan(Step(Phase.DECODE, (), (), ()))  # a table of padding rows alone
    q, k, v = (torch.randn(2, heads, 16, device=device) for heads in (4, 2, 2))
    graph = torch.cuda.CUDAGraph()
    running = runtime.begin_capture(2, host=False)
    runtime.attend(running, 0, q, k, v, 0.25)
    with torch.cuda.graph(graph):
        captured = runtime.attend(running, 0, q, k, v, 0.25)
    running = runtime.begin(Step.of((0, 1), (0, 0), (200, 90)))
    runtime.attend(running, 0, *(torch.randn(290, heads, 16, device=device) for heads in (4, 2, 2)), 0.25)
    runtime.commit(running)
    step = Step.of((0, 1), (200, 90), (1, 1))
    running = runtime.begin(step)
    graph.replay()
    torch.testing.assert_close(captured, runtime.attend(running, 0, q, k, v, 0.25), atol=1e-4, rtol=1e-4)


def test_the_row_of_the_page_fits(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "recent-on-gpu"))
    composed = compose(find_method(f"{path}:recent-on-gpu"))
    assert composed.exact
    assert composed.params["window_blocks"] == 8


def test_the_refusal_of_the_page_is_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(block("toml", "method.mine"))
    done = coattn("methods", str(path))
    assert done.returncode == 2
    assert done.stderr == block("text", "does not fit")
