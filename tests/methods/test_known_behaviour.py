"""What the papers' rows are known for, on the embedded model: a pass key that is asked for with its prompt, or late."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import coattn
from coattn import SamplingParams
from coattn.baselines.duo.head_labels import HeadLabels, retrieval_heads
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded, load
from coattn.text import default_text
from coattn.tools.calibrate.heads import make_prompt, score_heads

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT, KEY, SINKS, RECENT = 300, "48213", 8, 24
NEEDLE, QUESTION = f"\n\nThe pass key of the house is {KEY}. Remember it.\n\n", "\n\nThe pass key of the house is"


@cache
def loaded() -> Loaded:
    return load("smollm2", dtype="float32", device="cuda" if torch.cuda.is_available() else "cpu")


def encode(text: str) -> list[int]:
    return list(loaded().tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def finds(method: str, late: bool, **params: Any) -> bool:
    """late: the question comes token by token after the prompt, under the method; else it is the prompt's end."""
    text, question = encode(default_text().body[5000:9000])[:TEXT], encode(QUESTION)
    text = text[: TEXT // 3] + encode(NEEDLE) + text[TEXT // 3 :]
    with coattn.LLM((loaded().model, loaded().tokenizer), method, max_length=TEXT + 60, **params) as engine:
        own = SamplingParams(max_new_tokens=6, feed=tuple(question) if late else ())
        answer = engine.generate(text if late else text + question, own)[0]
    return KEY in answer.text


def test_full_attention_finds_it_either_way() -> None:
    assert finds("full", late=True)
    assert finds("full", late=False)


@pytest.mark.parametrize(
    ("method", "params"), [("h2o", {"heavy": 0.1, "recent": 0.1}), ("tova", {"cache_size": 64})], ids=str
)
def test_what_is_evicted_before_it_is_asked_for_is_lost(method: str, params: dict[str, Any]) -> None:
    assert not finds(method, late=True, **params)


def test_snapkv_keeps_what_the_question_points_at_and_no_more() -> None:
    """The question points at the word before the number: the pool must reach over all of its digits."""
    assert finds("snapkv", late=False, budget=64, window=8, kernel=15)
    assert not finds("snapkv", late=True, budget=64, window=8, kernel=15)


def test_duo_finds_it_in_retrieval_heads(tmp_path: Path) -> None:
    model, tokenizer = loaded().model, loaded().tokenizer
    text, draws = encode(default_text().body[20_000:40_000]), random.Random(0)
    scores = score_heads(model, [make_prompt(tokenizer, text, 512, draws)], SINKS, RECENT)
    marks = [shape.mark for shape in describe_layers(model)]
    best = retrieval_heads(scores, 0.5)
    found = {}
    for name, own in (("best", best), ("others", [[not head for head in layer] for layer in best])):
        path = tmp_path / f"{name}.json"
        HeadLabels("smollm2", marks, SINKS, RECENT, 0.5, scores, own).save(path)
        found[name] = finds("duo", late=True, heads=str(path), sinks=SINKS, recent=RECENT, block=8)
    assert found == {"best": True, "others": False}
