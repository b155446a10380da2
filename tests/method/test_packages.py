"""Parts and rows of installed packages."""

import json
from pathlib import Path

import pytest
import torch
from tests.cli.run import coattn as command
from tests.engine.small import greedy, llm, prompt, small
from tests.method.packages import install

import coattn
from coattn.errors import MethodError
from coattn.method.registry import METHODS, PARTS, registry
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.check import check

CODE = '''
from dataclasses import dataclass, field, replace
from typing import ClassVar

import coattn
from coattn.method.registry import METHODS as ROWS
from coattn.parts.executor.base import Executor
from coattn.parts.index.base import Index
from coattn.parts.maintenance.base import Maintenance
from coattn.parts.schedule.base import Inline
from coattn.parts.select.base import Select
from coattn.cache.config import OnGpu
from coattn.kernels.attend import attend
from coattn.types import Selection


@dataclass(frozen=True)
class OwnWork:
    """Blocks, as a kind of work of its own."""

    kind = "twice"
    blocks: object


@dataclass
class Own(OnGpu):
    """Everything in GPU memory."""

    name = "own"


@dataclass
class Remembers(Index):
    """Remembers nothing."""

    name = "remembers"
    provides = frozenset({"memories"})


@dataclass
class Picks(Select):
    """Everything, as work of its own kind."""

    name = "picks_own"
    needs = frozenset({"memories"})
    help_text = {"wanted": "a number"}

    wanted: int = 3

    def works(self, config):
        return frozenset({"gpu", "twice"})

    def pick(self, call):
        return call.visible if call.table is None else Selection((OwnWork(call.visible.gpu),))


@dataclass
class Runs(Executor):
    """Runs work of its own kind."""

    name = "runs_own"
    runs = frozenset({"twice"})
    capturable = False
    count: ClassVar[int] = 0

    def run(self, call, work):
        Runs.count += 1
        return attend(call.q, call.cache.gpu.memory[call.layer], work.blocks, call.scale, call.shape.softcap)


@dataclass
class Now(Inline):
    """One after another."""

    name = "now"


@dataclass
class Rests(Maintenance):
    """Does nothing."""

    name = "rests"


PARTS = (Own, Remembers, Picks, Runs, Now, Rests)
METHODS = (
    coattn.Method(
        "outside", cache="own", index="remembers", select="picks_own", executor="runs_own", schedule="now",
        maintenance="rests", summary="Exact. From outside.", params={"wanted": 5},
    ),
    replace(ROWS["cpu"], name="derived", params={"window_blocks": 2}),
)
NEEDS = {"memories": "an index that remembers"}
WORK_KINDS = {"twice": "that are its own"}
'''
PROMPT = prompt(40)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "coattn-outside", CODE, monkeypatch)


@pytest.mark.usefixtures("outside")
def test_a_package_adds_a_part_on_every_axis_with_its_own_kind_of_work() -> None:
    composed = compose(METHODS["outside"])
    assert composed.params["wanted"] == 5
    assert composed.exact
    assert registry().packages["select", "picks_own"] == registry().packages["method", "derived"] == "coattn-outside"
    assert not check(METHODS["outside"], layers=2).problems


@pytest.mark.usefixtures("outside")
def test_its_row_answers_in_an_engine_and_when_attached() -> None:
    wanted = llm("full").generate([PROMPT], greedy(8))[0].token_ids
    with llm("outside", wanted=7) as engine:
        assert engine.generate([PROMPT], greedy(8))[0].token_ids == wanted
    runs = PARTS["executor"]["runs_own"].count  # type: ignore[attr-defined]
    assert runs >= 2 * 7
    model = small()
    ids = torch.tensor([PROMPT], device=model.device)
    with coattn.attach(model, "outside"):
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert found[0, len(PROMPT) :].tolist() == list(wanted)
    assert PARTS["executor"]["runs_own"].count > runs  # type: ignore[attr-defined]


@pytest.mark.usefixtures("outside")
def test_its_words_are_said_where_a_row_does_not_fit() -> None:
    with pytest.raises(MethodError, match="select 'picks_own' needs an index that remembers"):
        compose(coattn.Method("a", "own", "picks_own", "runs_own"))
    with pytest.raises(MethodError, match="entries that are its own, which executor 'gpu' does not attend to"):
        compose(coattn.Method("b", "own", "picks_own", index="remembers"))


@pytest.mark.usefixtures("outside")
def test_a_row_in_a_file_may_name_what_a_package_has(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text('[method.mine]\ncache = "coattn_outside:Own"\nselect = "everything"\nschedule = "now"\n')
    assert compose(find_method(str(path))).build().config.name == "own"


RULE = "from coattn.parts.select.base import Select\nclass Rule(Select):\n    name = 'rule'\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named 'nothing_of"),
        ("PARTS = (3,)", "PARTS holds 3, which is no subclass of coattn.part.Part"),
        ("METHODS = ('a',)", "METHODS holds 'a', which is no coattn.Method"),
        ("A = 1", "'coattn_broken' has no PARTS and no METHODS"),
        (f"{RULE}PARTS = Rule", "but must be a tuple: PARTS = (...,)"),
        (f"{RULE}PARTS = (Rule,)", "part Rule is no dataclass: write @dataclass above it"),
        (f"import dataclasses\n{RULE}PARTS = (dataclasses.dataclass(Rule),)", "part Rule has no method 'pick'"),
        ("import coattn\nMETHODS = (coattn.Method('full', 'gpu', 'everything'),)", "method 'full' exists already"),
        ("from coattn.parts.index.base import NoIndex\nPARTS = (NoIndex,)", "index 'none' exists already, from coattn"),
    ],
)
def test_a_package_that_cannot_be_used_costs_its_own_rows_only(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "coattn-broken", code, monkeypatch)
    install(tmp_path, "coattn-outside", CODE, monkeypatch)
    assert compose(find_method("full")).exact
    assert compose(find_method("outside")).exact
    (failure,) = registry().failures
    assert str(failure).startswith("The parts of package 'coattn-broken' are not available: ")
    assert reason in str(failure)
    assert failure.hint == "Correct the package, or remove it: pip uninstall coattn-broken."
    with pytest.raises(MethodError, match=r"There is no method 'mine'\. The parts of package 'coattn-broken' are not"):
        find_method("mine")
    with pytest.raises(MethodError, match=r"select 'mine'.*The parts of package 'coattn-broken' are not"):
        compose(coattn.Method("a", "gpu", "mine"))


def test_two_packages_with_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import coattn\nMETHODS = (coattn.Method('mine', 'gpu', 'everything'),)"
    for package in ("coattn-a", "coattn-b"):
        install(tmp_path, package, code, monkeypatch)
    assert registry().packages["method", "mine"] == "coattn-a"
    (failure,) = registry().failures
    assert str(failure).endswith("'coattn-b' are not available: method 'mine' exists already, from coattn-a.")


def test_the_command_says_what_comes_from_which_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "coattn-outside", CODE, monkeypatch)
    install(tmp_path, "coattn-broken", "1 / 0", monkeypatch)
    page, data = command("methods"), json.loads(command("methods", "--json").stdout)
    assert "From package coattn-outside: select picks_own." in page.stdout
    assert "warning: The parts of package 'coattn-broken' are not available" in page.stderr
    packages = {row["name"]: row["package"] for row in data["methods"]}
    assert packages["outside"] == "coattn-outside"
    assert packages["full"] is None
    assert "ZeroDivisionError" in data["unavailable"][0]
