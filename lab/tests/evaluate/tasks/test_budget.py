"""Rows at equal GPU memory: sizes are what a run takes, budgets are met or the row says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.evaluate.tasks.small_prompts import file_of, loaded, made

from coattn.cli.options import parse_settings
from coattn.errors import ConfigError
from coattn.text import Text
from coattn.types import LayerShape
from coattn_lab.evaluate.results import read_result
from coattn_lab.evaluate.tasks import budget, calibrated, following, leaderboard
from coattn_lab.evaluate.tasks import run as tasks
from coattn_lab.evaluate.tasks.row import Row

QWEN = [LayerShape(14, 2, 64, torch.bfloat16, torch.device("cuda")) for _ in range(24)]
LARGE = budget.Size(QWEN, 24, 16362)
FOUR = budget.Size(QWEN[:4], 24, 16362)
"""The same shares, faster to plan."""
MEASURED = {
    "full": 201342976,
    "h2o,heavy=1024,recent=1024": 35025408,
    "tova,cache_size=2048": 35025408,
    "hcattention,groups=16": 26784456,
    "quest,budget=2048": 213709824,
    "oracle,budget=2048": 201056768,
    "duo,heads=alternate": 201342976,
}
"""GPU bytes a sequence that runs on an H200 reported, room for the prompt that is read included: commit a9697b0, batch
24, sequences of 16,362 tokens of the long-context model. Rows whose DRAM lends memory to pass through are not here."""


def row(text: str) -> Row:
    (found,) = tasks.parse_rows([text], parse_settings)
    return found


TEXT = Text("a text", "".join(f"{i * i % 97} and so on. " for i in range(400)))


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_row_needs_is_what_a_gpu_reported(name: str) -> None:
    composed = row(name).composed
    assert composed is not None
    with budget._opened(LARGE, composed) as (runtime, _):
        reading = budget.reading_bytes(runtime)
    assert (budget.needed(LARGE, composed) + reading) // LARGE.batch == MEASURED[name]
    assert (reading > 0) == (composed.method.cache == "evicting")


@pytest.mark.parametrize("share", [0.06, 0.125, 0.25])
def test_every_row_meets_a_budget_or_says_why_not(share: float) -> None:
    for name, sizing in budget.SIZINGS.items():
        settled = budget.settle(row("duo,heads=alternate" if name == "duo" else name), share, FOUR)
        if sizing.knob is None:
            assert settled.why is not None, name
            assert settled.planned > 0.9, name
        else:
            assert settled.why is None, (name, settled.why)
            assert share * (1 - budget.CLOSE) <= settled.planned <= share, (name, settled.planned)
            assert settled.row.gpu_share == settled.row.budget == share


def test_what_the_user_set_stays() -> None:
    settled = budget.settle(row("scout,budget=1024"), 0.25, LARGE)
    assert settled.row.composed is not None
    assert settled.row.composed.params["budget"] == 1024
    assert settled.why == "budget was given"
    quest = budget.settle(row("quest"), 0.125, LARGE)
    assert quest.row.composed is not None
    assert quest.row.composed.params["budget"] == 2045
    assert "keeps every token in GPU memory" in (quest.why or "")


def test_a_budget_below_the_least_is_said() -> None:
    tight = budget.Size(QWEN, 1, 600)
    settled = budget.settle(row("scout"), 0.06, tight)
    assert "cannot do with less than" in (settled.why or "")
    assert settled.planned > 0.06


def test_budgets_are_written_as_shares() -> None:
    assert budget.parse_budgets("6%,12.5%, 1/4,25%") == [0.06, 0.125, 0.25]
    for wrong in ("", "x%", "120%", "0"):
        with pytest.raises(ConfigError, match="--budget"):
            budget.parse_budgets(wrong)


def test_a_run_takes_what_was_planned_and_stays_beside_full(tmp_path: Path) -> None:
    """Bytes that the runs report, and KL beside full attention: nothing of an exact row, something of a lossy one."""
    model, share = loaded(), 0.4
    asked = leaderboard.Asked(
        tasks.parse_rows(["full,cpu,block=4,streaming,block=4,sinks=4,h2o,block=4"], parse_settings),
        [share], [], TEXT, 3, {"batch": 1, "modes": ("fed",)},
    )  # fmt: skip
    prompts = file_of(*made(1, length=400))
    assert leaderboard.run_all(model, prompts, asked, tmp_path) == {}
    found = {}
    for path in (tmp_path / "400").glob("*.json"):
        data = read_result(path)
        found[data["method"]] = data
        run = data["runs"]["400"]
        if data["method"] == "full":
            assert data["budget"] is None
            continue
        assert (data["budget"], data["budget_why"]) == (share, None)
        assert abs(run["gpu_share"] / share - 1) <= budget.CLOSE, (data["named"], run["gpu_share"])
    assert set(found) == {"full", "cpu", "streaming", "h2o"}
    kl = {name: data["runs"]["400"]["answer_kl"] for name, data in found.items()}
    assert kl["full"]["kl"] == 0
    assert kl["cpu"]["kl"] < 1e-9
    assert kl["streaming"]["kl"] > 1e-6
    assert {each["steps"] for each in kl.values()} == {3}
    again = leaderboard.run_all(model, prompts, asked, tmp_path)  # nothing is left to do
    assert again == {}


def test_kl_is_that_of_the_same_tokens_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a slow re-statement: the model reads the context, then question and answer go in under the row."""
    from coattn.engine.llm import LLM
    from coattn.tools.evaluate.fidelity import kl_divergence
    from coattn.tools.evaluate.forced import force
    from coattn_lab.evaluate.tasks.reading import read_all

    model, params = loaded(), {"recent": 24, "sinks": 4, "block": 4}
    plan = tasks.plan(model, file_of(*made(2, length=400), *made(1, length=400, task="fwe")), batch=2)
    held = following.choose(list(read_all(plan.asks, model)), 3, 500, 1)
    assert [each.ask.prompt.task for each in held] == ["vt", "fwe"]
    more = following.choose(list(read_all(plan.asks, model)), 3, 500, 3)
    assert [each.ask.prompt.name for each in more] == [plan.asks[i].prompt.name for i in (0, 2, 1)]
    reference = following.refer(model, held, steps=3, batch=2, most=400)
    with LLM(model, "streaming", max_batch=2, max_length=400, reuse=False, **params) as llm:
        found = following.compare(llm.runner, reference, 1)  # one by one: two batches
    expected = []
    for each, answer in zip(held, reference.answers, strict=True):
        ids = torch.tensor([*each.ask.ids, *answer])[:-1]
        forced = [
            force(model.model, ids, each.ask.split, name, **more)
            for name, more in (("full", {}), ("streaming", params))
        ]
        kl = kl_divergence(*(each.logits[-3:] for each in forced))
        expected.append(float(kl.mean()))
    assert found["kl"] == pytest.approx(sum(expected) / 2, rel=1e-4)
    assert found["prompts"] == 2


def test_files_that_are_lacking_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = loaded(), []
    made_by: list[str] = []
    for name in ("write_heads", "write_skew", "write_codebook"):
        real = getattr(calibrated, name)

        def counted(*given: Any, _name: str = name, _real: Any = real, **more: Any) -> Any:
            made_by.append(_name)
            more |= {"lengths": (400,), "samples": 1} if _name == "write_heads" else {}
            more |= {"samples": 1, "length": 256} if _name == "write_codebook" else {}
            return _real(*given, **more)

        monkeypatch.setattr(calibrated, name, counted)
    wanted = [row("infinigen"), row("hcattention,groups=2,centroids=16"), row("full")]
    for _ in range(2):
        rows = [calibrated.calibrated(each, model, TEXT, tmp_path, said.append) for each in wanted]
    assert made_by == ["write_skew", "write_codebook"]
    assert [len(each.files) for each in rows] == [1, 1, 0]
    assert rows[1].name == "hcattention,groups=2,centroids=16"
    assert "has no skew" in said[0]
    assert "has no codebook" in said[1]
    plan = tasks.plan(model, file_of(*made(1)))
    config = plan.config(rows[0])
    assert config["params"]["skew"] == "skew.safetensors"
    assert len(config["files"]["skew"]["sha256"]) == 64
    assert "a text" in config["files"]["skew"]["origin"]
    given = replace(wanted[0], composed=rows[0].composed)
    assert calibrated.calibrated(given, model, TEXT, tmp_path / "other", said.append) is given


@pytest.mark.parametrize("name", ["h2o,block=4", "tova,block=4"])
def test_rows_that_drop_tokens_have_room_for_many_prompts_one_after_the_other(tmp_path: Path, name: str) -> None:
    """They have room for one whole prompt beside what stays of the others, for KL as for answers."""
    prompts = file_of(*(made(1, length=400, task=task)[0] for task in ("vt", "fwe", "cwe", "qa_1", "qa_2", "niah")))
    asked = leaderboard.Asked(
        tasks.parse_rows([name], parse_settings), [0.125], [], TEXT, 3, {"batch": 6, "modes": ("fed",)}
    )
    assert leaderboard.run_all(loaded(), prompts, asked, tmp_path) == {}
    (path,) = (tmp_path / "400").glob("*.json")
    run = read_result(path)["runs"]["400"]
    assert run["answer_kl"]["prompts"] == 6
    assert run["answer_kl"]["kl"] > 1e-6
