"""What the papers' rows are known for, on the embedded model: a pass key that is asked for with its prompt, or late."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import coattn
from coattn import SamplingParams
from coattn.calibrate.heads import make_prompt, score_heads
from coattn.evaluate.haystack import Haystack, frame
from coattn.evaluate.needle import Cell, grid, judge, prompt
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded, load
from coattn.select.head_labels import HeadLabels, retrieval_heads
from coattn.text import default_text

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTH, SINKS, RECENT = 640, 8, 24
CELL: Cell = grid([LENGTH], 1)[0]


@cache
def loaded() -> Loaded:
    return load("smollm2", dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")


@cache
def ids() -> tuple[list[int], list[int]]:
    """The text with the pass key in its middle, and the question."""
    whole = prompt(CELL, Haystack(default_text(), loaded().tokenizer, LENGTH))
    question = frame(loaded().tokenizer, f"{CELL.asked.before}\n\n", f"\n\n{CELL.asked.question}")[1]
    assert whole[-len(question) :] == question
    return whole[: -len(question)], question


def finds(method: str, late: bool, **params: Any) -> bool:
    """late: the question comes token by token after the prompt, under the method."""
    text, question = ids()
    with coattn.LLM((loaded().model, loaded().tokenizer), method, max_length=LENGTH + 16, **params) as engine:
        if late:
            answer = engine.generate(text, SamplingParams(max_new_tokens=12, feed=tuple(question)))[0]
        else:
            answer = engine.generate(text + question, SamplingParams(max_new_tokens=12))[0]
    return bool(judge(CELL, answer.text)["found"])


def test_full_attention_finds_it_either_way() -> None:
    assert finds("full", late=True)
    assert finds("full", late=False)


@pytest.mark.parametrize(
    ("method", "params"), [("h2o", {"heavy": 0.08, "recent": 0.08}), ("tova", {"cache_size": 100})], ids=str
)
def test_what_is_evicted_before_it_is_asked_for_is_lost(method: str, params: dict[str, Any]) -> None:
    assert not finds(method, late=True, **params)


def test_snapkv_keeps_what_the_question_points_at_and_no_more() -> None:
    assert finds("snapkv", late=False, budget=100)
    assert not finds("snapkv", late=True, budget=100)


def test_duo_finds_it_in_retrieval_heads(tmp_path: Path) -> None:
    model, tokenizer = loaded().model, loaded().tokenizer
    text, draws = tokenizer(default_text().body[:20_000], verbose=False).input_ids, random.Random(0)
    scores = score_heads(model, [make_prompt(tokenizer, text, 768, draws)], SINKS, RECENT)
    marks = [shape.mark for shape in describe_layers(model)]
    best = retrieval_heads(scores, 0.5)
    found = {}
    for name, own in (("best", best), ("others", [[not head for head in layer] for layer in best])):
        path = tmp_path / f"{name}.json"
        HeadLabels("smollm2", marks, SINKS, RECENT, 0.5, scores, own).save(path)
        found[name] = finds("duo", late=True, heads=str(path), sinks=SINKS, recent=RECENT, block=8)
    assert found == {"best": True, "others": False}
