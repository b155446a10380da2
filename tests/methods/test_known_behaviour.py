"""What the papers' rows are known for, on the embedded model: a pass key that is asked for with its prompt, or late."""

from functools import cache
from typing import Any

import pytest
import torch

import coattn
from coattn import SamplingParams
from coattn.hf.load import Loaded, load
from coattn.text import default_text

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT, KEY = 300, "48213"
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
