"""One piece of memory holds everything of a prompt, nothing twice."""

from itertools import pairwise

import pytest
import torch

from coattn.hf.prefilled import QUERIES
from coattn.transfer.layout import ALIGN, Layout
from coattn.types import LayerShape

CPU = torch.device("cpu")
SHAPES = [LayerShape(4, 2, 8, torch.float32, CPU), LayerShape(6, 3, 5, torch.bfloat16, CPU)]


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
