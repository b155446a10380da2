"""Rows over prompts: each is read once, exact rows answer as Transformers does, a run that was cut off goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.evaluate.tasks.small_prompts import file_of, loaded, made
from tests.engine.small import by_transformers, tokenizer

from coattn.cli.options import parse_settings
from coattn.errors import ConfigError, InputError
from coattn_lab.evaluate.tasks import reading
from coattn_lab.evaluate.tasks import run as tasks
from coattn_lab.evaluate.tasks.prompts import encode
from coattn_lab.evaluate.tasks.reading import kv_bytes


def rows(*texts: str) -> list[tasks.Row]:
    return tasks.parse_rows(texts, parse_settings)


def answers(result: dict[str, Any], mode: str) -> list[str]:
    return [item["answer"] for item in result["items"] if item["mode"] == mode]


@pytest.mark.slow
def test_exact_rows_answer_as_transformers_does_in_both_modes(tmp_path: Path) -> None:
    model = loaded()
    prompts = [*made(2), *made(1, length=400, task="fwe")]
    plan = tasks.plan(model, file_of(*prompts), batch=2, whole=True)
    wanted = rows("full,cpu,offload")
    (full, cpu, offload), _ = tasks.run(plan, wanted, tmp_path)
    expected = []
    for prompt in prompts:
        ids = by_transformers(model.model, encode(prompt, tokenizer())[0], prompt.new_tokens)
        expected.append(tokenizer().decode(ids, skip_special_tokens=True))
    for result in (full, cpu, offload):
        assert answers(result, "read") == expected
        assert answers(result, "fed") == expected
    assert [run["length"] for run in full["runs"].values()] == [200, 400]
    assert full["complete"]


def test_each_prompt_is_read_once_and_every_row_gets_its_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = reading.prefill_ends

    def counted(model: Any, ids: list[int], *more: Any) -> Any:
        read.append(len(ids))
        return real(model, ids, *more)

    monkeypatch.setattr(reading, "prefill_ends", counted)
    plan = tasks.plan(loaded(), file_of(*made(4)), batch=2)
    tasks.run(plan, rows("full,quest,budget=96,streaming,recent=32"), tmp_path)
    assert len(read) == 4


@pytest.mark.slow
def test_prompts_are_read_in_parts_that_fit(tmp_path: Path) -> None:
    model = loaded()
    plan = tasks.plan(model, file_of(*made(3), *made(2, length=400)), batch=2, hold=1)
    one = kv_bytes(model.model, max(len(ask.ids) for ask in plan.asks if ask.prompt.length == 200))
    sizes = [len(wave) for wave in reading.waves(plan.asks, model.model, 2 * one)]
    assert sizes[:2] == [2, 1]
    assert sum(sizes) == 5
    assert max(len({ask.prompt.length for ask in wave}) for wave in reading.waves(plan.asks, model.model, None)) == 1
    by_parts = tasks.run(plan, rows("full"), tmp_path / "parts")[0][0]
    at_once = tasks.run(tasks.plan(model, file_of(*made(3), *made(2, length=400))), rows("full"), tmp_path / "once")[0][
        0
    ]
    assert by_parts["items"] == at_once["items"]


def test_ending_an_answer_early_changes_no_score(tmp_path: Path) -> None:
    prompts, model = made(3), loaded()
    early = tasks.run(tasks.plan(model, file_of(*prompts)), rows("streaming,recent=32"), tmp_path / "a")[0][0]
    whole = tasks.run(tasks.plan(model, file_of(*prompts), whole=True), rows("streaming,recent=32"), tmp_path / "b")[0][
        0
    ]
    for one, other in zip(early["items"], whole["items"], strict=True):
        assert (one["item"], one["score"], one["found_at"]) == (other["item"], other["score"], other["found_at"])
        assert other["answer"].startswith(one["answer"].rstrip("\ufffd"))


def test_tokens_to_the_answer_are_counted(tmp_path: Path) -> None:
    model = loaded()
    for prompt in (each for seed in range(20) for each in made(4, seed=seed)):
        ids = by_transformers(model.model, encode(prompt, tokenizer())[0], 12)
        text = tokenizer().decode(ids[:3])
        if len(ids) == 12 and text.isascii() and text.isprintable() and text[2] not in text[:2]:
            break
    else:
        pytest.fail("the random model never says three characters")
    asked = replace(prompt, outputs=(text[2],))
    for whole in (False, True):
        plan = tasks.plan(model, file_of(asked), whole=whole)
        result = tasks.run(plan, rows("full"), tmp_path / str(whole))[0][0]
        for item in result["items"]:
            assert (item["score"], item["found_at"]) == (1, 3)
            assert item["tokens"] == (12 if whole else 3)
        assert result["scores"][0]["tokens_to_answer"] == 3


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tasks.plan(loaded(), file_of(*made(3)), batch=1)
    whole, _ = tasks.run(plan, rows("full,streaming,recent=32"), tmp_path / "whole")
    real, left = tasks.run_row, 3

    def cut_off(*given: Any, **more: Any) -> Any:
        nonlocal left
        for item in real(*given, **more):
            if not left:
                raise KeyboardInterrupt
            left -= 1
            yield item

    monkeypatch.setattr(tasks, "run_row", cut_off)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(plan, rows("full,streaming,recent=32"), tmp_path / "cut")
    kept = json.loads((tmp_path / "cut" / "full.json").read_text())
    assert (len(kept["items"]), kept["complete"]) == (3, False)
    asked: list[str] = []

    def watched(loaded: Any, row: Any, wanted: Any, **more: Any) -> Any:
        asked.extend(f"{row.name} {held.ask.prompt.name}#{mode}" for held, mode in wanted)
        yield from real(loaded, row, wanted, **more)

    monkeypatch.setattr(tasks, "run_row", watched)
    again, _ = tasks.run(plan, rows("full,streaming,recent=32"), tmp_path / "cut")
    assert len(asked) == 2 * 6 - 3
    assert not any(f"full {item['item']}" in asked for item in kept["items"])
    assert [each["items"] for each in again] == [each["items"] for each in whole]
    asked.clear()
    tasks.run(plan, rows("full"), tmp_path / "cut")
    assert asked == []


def test_other_prompts_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    tasks.run(tasks.plan(loaded(), file_of(*made(1))), rows("full"), tmp_path)
    with pytest.raises(InputError, match="another prompt_count"):
        tasks.run(tasks.plan(loaded(), file_of(*made(2))), rows("full"), tmp_path)


def test_a_share_of_the_gpu_is_kept_to(tmp_path: Path) -> None:
    plan = tasks.plan(loaded(), file_of(*made(3, length=400)), batch=2)
    (tight, loose), _ = tasks.run(plan, rows("streaming,block=8,sinks=8,gpu_share=1/4|1/2"), tmp_path)
    assert tight["runs"]["400"]["gpu_share"] <= 0.25 < loose["runs"]["400"]["gpu_share"] <= 0.5
    assert (tight["named"], tight["gpu_share"]) == ("streaming,block=8,sinks=8,gpu_share=1/4", 0.25)


def test_a_row_that_fails_ends_alone_and_keeps_what_it_has(tmp_path: Path) -> None:
    prompts = [*made(2), *made(2, length=400)]
    plan = tasks.plan(loaded(), file_of(*prompts), batch=2)

    done, failed = tasks.run(plan, rows("streaming,gpu_share=1/16,full"), tmp_path)
    assert [each["named"] for each in done] == ["full"]
    assert "needs at least" in str(failed["streaming,gpu_share=1/16"])
    assert len(done[0]["items"]) == 8


def test_rows_are_written_with_commas() -> None:
    found = rows("full, scout,budget=512|1024,quest", "streaming,recent=64,sinks=4")
    assert [row.name for row in found] == [
        "full", "scout,budget=512", "scout,budget=1024", "quest", "streaming,recent=64,sinks=4",
    ]  # fmt: skip
    for wrong, said in (
        (("budget=1",), "before any row"),
        (("",), "no rows"),
        (("full,gpu_share=2",), "gpu_share is '2'"),
    ):
        with pytest.raises(ConfigError, match=said):
            rows(*wrong)
