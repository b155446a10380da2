"""One piece of memory holds everything of a prompt, nothing twice."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from coattn.hf.prefilled import QUERIES
from coattn.transfer.layout import ALIGN, Layout, Rows
from coattn.types import LayerShape

CPU = torch.device("cpu")
SHAPES = [LayerShape(4, 2, 8, torch.float32, CPU), LayerShape(6, 3, 5, torch.bfloat16, CPU)]


@pytest.mark.parametrize("tokens", [1, 7, QUERIES, 130])
def test_every_byte_has_one_place(tokens: int) -> None:
    layout = Layout(SHAPES, 11, tokens)
    whole = [Rows(i, 0, tokens, 0, layout.queries) for i in range(len(SHAPES))]
    spans = sorted([*(s for rows in whole for s in layout.rows(rows)), layout.logits()], key=lambda s: s.offset)
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
            heard = 100 - layout.queries
            rows = Rows(layer, start, end, max(heard, start) - heard, max(heard, end) - heard)
            for i, span in enumerate(layout.rows(rows)):
                span.of(memory).fill_(1000 * layer + 100 * i + start / 30)
    layout.logits().of(memory).fill_(7)
    made = layout.prefilled(memory, range(100), [0.5, 0.25], "x")
    assert made.fault() is None
    for layer, (k, v) in enumerate(made.kv):
        want = 1000 * layer + torch.arange(100) // 30
        assert torch.equal(k[:, 1, 3].long(), want.to(k.dtype).long())
        assert torch.equal(v[:, 0, 4].long(), (want + 100).to(v.dtype).long())
    assert made.logits.tolist() == [[7.0] * 11]
