"""Numbers that no machine can use, files of another kind and devices: one sentence and a hint, at once."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from tests.cli.run import coattn

from coattn import LLM, SamplingParams
from coattn.cli.options import Count, numbers
from coattn.errors import ConfigError, InputError
from coattn.hf.load import load
from coattn.hf.prefilled import Prefilled, prefill
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.part import check_number
from coattn.units import parse_bytes
from tests.cli.test_bad_input import assert_refused, folder

__all__ = ["folder"]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, True, "x", [1.0]], ids=range(7))
def test_every_number_of_every_method_is_a_finite_one(method: str, value: Any) -> None:
    numbers = [name for name, default in compose(METHODS[method]).params.items() if type(default) is float]
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name} is "):
            compose(METHODS[method], **{name: value})


@pytest.mark.parametrize(
    ("value", "low", "high", "above", "ok"),
    [
        (0, 0, 1, False, True), (0, 0, 1, True, False), (1, 0, 1, True, True), (1.0001, 0, 1, False, False),
        (-0.1, 0, 1, False, False), (1e308, 0, math.inf, False, True), (math.inf, 0, math.inf, False, False),
        (-1, -1, 1, False, True), (None, 0, 1, False, False),
    ],
)  # fmt: skip
def test_a_number_lies_in_its_range(value: Any, low: float, high: float, above: bool, ok: bool) -> None:
    if ok:
        check_number("x", value, low, high, above=above)
        return
    with pytest.raises(ConfigError, match="x is "):
        check_number("x", value, low, high, above=above)


@pytest.mark.parametrize("size", [1e400, 10**400, 1 << 60, "9" * 30, -1, math.nan], ids=range(6))
def test_sizes_that_no_machine_has(size: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_kv"):
        parse_bytes(size, "gpu_kv")


@pytest.mark.parametrize(
    ("text", "number"), [("32k", 32_000), ("32Ki", 32_768), ("1.5k", 1500), ("1M", 1_000_000), ("4_096", 4096)]
)
def test_lengths_as_people_write_them(text: str, number: int) -> None:
    assert Count(1).convert(text, None, None) == number
    assert numbers(None, click.Option(["--lengths"]), f"7,{text}") == [7, number]


@pytest.mark.parametrize("text", ["32kb", "k", "1e3", "-32k", "1.5", "0x10", "9999999999m"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(click.UsageError, match="not a whole number"):
        Count(1).convert(text, None, None)
    with pytest.raises(ConfigError, match="--lengths is"):
        numbers(None, click.Option(["--lengths"]), text)


def test_more_log_probabilities_than_tokens(folder: Path) -> None:
    with LLM(load(folder, device="cpu"), max_batch=1, max_length=64) as llm:
        with pytest.raises(ConfigError, match="logprobs is 161"):
            llm.generate([1, 2], SamplingParams(logprobs=161))
        with pytest.raises(ConfigError, match="max_batch"):
            LLM(load(folder, device="cpu"), max_batch=1 << 31)


def test_a_chat_template_that_fails(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    assert_refused(coattn("generate", "w1", "--model", str(tmp_path)), "chat template", "division by zero")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory."), "more memory than"),
        (PermissionError(13, "Permission denied", "/some/where"), "/some/where cannot be used: Permission denied"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.tools.plan.estimate.held", Mock(side_effect=error))  # which no other module imports
    assert_refused(coattn("plan", "smollm2"), said)


@pytest.mark.parametrize(
    ("ids", "chunk", "words"),
    [
        ("text", 8, "not token ids"),
        ([], 8, "shape"),
        ([[1, 2]], 8, "shape"),
        ([1.5], 8, "float32"),
        ([1, 10**6], 8, "to 1,000,000"),
        ([-1], 8, "from -1"),
        ([1] * 600, 8, "512 positions"),
        ([1], 0, "chunk is 0"),
        ([None], 8, "not token ids"),
    ],
)
def test_prompts_that_cannot_be_prefilled(folder: Path, ids: Any, chunk: int, words: str) -> None:
    with pytest.raises((InputError, ConfigError), match=words):
        prefill(load(folder, device="cpu").model, ids, chunk)


def test_prefilled_files_that_do_not_belong_together(folder: Path, tmp_path: Path) -> None:
    made = prefill(load(folder, device="cpu").model, [3, 4, 5])
    for broken, words in (
        (replace(made, tokens=(3, 4)), "layer 0"),
        (replace(made, tokens=()), "no tokens"),
        (replace(made, scales=made.scales[:1]), "one number"),
        (replace(made, logits=made.logits[0]), "logits"),
        (replace(made, queries=tuple(q[..., :2] for q in made.queries)), "queries of layer 0"),
    ):
        with pytest.raises(InputError, match=words):
            broken.check([], "")
    replace(made, tokens=(3, 4)).save(tmp_path / "broken")
    with pytest.raises(InputError, match="layer 0"):
        Prefilled.load(tmp_path / "broken")
    (tmp_path / "text").write_text("nothing")
    for path in (tmp_path / "nothing", tmp_path / "text", tmp_path):
        with pytest.raises(InputError, match="no prefilled prompt"):
            Prefilled.load(path)
    with pytest.raises(InputError, match="cannot be written"):
        made.save(tmp_path / "no" / "folder")
