"""What two sides must have alike; and one piece of memory holds everything of a prompt, nothing twice."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from coattn.hf.prefilled import QUERIES
from coattn.transfer.layout import ALIGN, FORMAT, Layout, introduce, mismatch
from coattn.types import LayerShape

CPU = torch.device("cpu")
SHAPES = [LayerShape(4, 2, 8, torch.float32, CPU), LayerShape(6, 3, 5, torch.bfloat16, CPU)]
MARKS = {"configuration": "a", "weights": "b", "tokenizer": "c", "other": "d"}


@pytest.mark.parametrize("tokens", [1, 7, QUERIES, 130])
def test_every_byte_has_one_place(tokens: int) -> None:
    layout = Layout(SHAPES, 11, tokens)
    kv = [span for layer in range(len(SHAPES)) for span in layout.rows(layer, 0, tokens)]
    spans = sorted([*kv, *layout.last()], key=lambda s: s.offset)
    assert all(span.offset % ALIGN == 0 for span in spans)
    for one, following in pairwise(spans):
        assert 0 <= following.offset - (one.offset + one.nbytes) < ALIGN
    assert spans[-1].offset + spans[-1].nbytes == layout.size


def test_rows_are_parts_of_the_whole() -> None:
    layout = Layout(SHAPES, 11, 100)
    memory = torch.zeros(layout.size, dtype=torch.uint8)
    for layer in range(2):
        for start in range(0, 100, 30):
            end = min(100, start + 30)
            for i, span in enumerate(layout.rows(layer, start, end)):
                span.of(memory).fill_(1000 * layer + 100 * i + start / 30)
    for i, span in enumerate(layout.last()):
        span.of(memory).fill_(5 + i)
    made = layout.prefilled(memory, range(100), [0.5, 0.25], "x")
    assert made.fault() is None
    for layer, (k, v) in enumerate(made.kv):
        want = 1000 * layer + torch.arange(100) // 30
        assert torch.equal(k[:, 1, 3].long(), want.to(k.dtype).long())
        assert torch.equal(v[:, 0, 4].long(), (want + 100).to(v.dtype).long())
    assert [q.unique().tolist() for q in made.queries] == [[5.0], [6.0]]
    assert made.logits.tolist() == [[7.0] * 11]


def own(marks: dict[str, str] = MARKS, shape: LayerShape = SHAPES[0], vocabulary: int = 10) -> Any:
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
        (own(shape=replace(SHAPES[0], kv_heads=4)), "other shapes"),
        (own(vocabulary=11), "other shapes"),
    ],
)
def test_what_differs_is_said(theirs: Any, why: str) -> None:
    said = mismatch(theirs, own())
    assert said is not None
    assert why in said
