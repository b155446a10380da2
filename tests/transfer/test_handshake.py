"""What two sides must have alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from coattn.transfer.layout import FORMAT, introduce, mismatch
from coattn.types import LayerShape

MARKS = {"configuration": "a", "weights": "b", "tokenizer": "c", "other": "d"}
SHAPE = LayerShape(4, 2, 8, torch.float32, torch.device("cpu"))


def own(marks: dict[str, str] = MARKS, shape: LayerShape = SHAPE, vocabulary: int = 10) -> Any:
    return introduce(marks, [shape] * 2, vocabulary)


def test_sides_that_are_alike_fit() -> None:
    assert mismatch(own(), own()) is None
    assert mismatch(own(marks={**MARKS, "other": "x"}), own()) is None


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({**own(), "op": "read"}, f"another version than {FORMAT}"),
        ({**own(), "format": FORMAT + 1}, f"another version than {FORMAT}"),
        (own(marks={**MARKS, "weights": "x", "tokenizer": "y"}), "another weights and another tokenizer"),
        ({**own(), "fingerprints": "abc"}, "another configuration and another weights and another tokenizer"),
        (own(shape=replace(SHAPE, kv_heads=4)), "other shapes"),
        (own(vocabulary=11), "other shapes"),
    ],
)
def test_what_differs_is_said(theirs: Any, why: str) -> None:
    said = mismatch(theirs, own())
    assert said is not None
    assert why in said
