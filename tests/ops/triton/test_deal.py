"""Dividing chosen entries: the kernel against PyTorch, and both against what it says."""

from __future__ import annotations

import pytest
import torch

from coattn.ops import deal as plain
from coattn.ops.attend_scored import Chosen

pytest.importorskip("triton")
from coattn.ops.triton import deal as kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, HEADS, SPLITS, LOOK = 3, 2, 4, 8


def chosen() -> Chosen:
    """Ids of each piece at its own place; between them lies nonsense."""
    tokens = torch.tensor([128, 90, 5], dtype=torch.int32)
    ids, count = torch.full((ROWS, HEADS, 128), -7, dtype=torch.int32), torch.zeros(ROWS, HEADS, SPLITS, 3).int()
    count[..., 1] = torch.randint(0, 3, (ROWS, HEADS, SPLITS))
    later = torch.full((ROWS, HEADS, SPLITS, 16), -5, dtype=torch.int32)
    for row, n in enumerate(tokens.tolist()):
        whole = (n + LOOK - 1) // LOOK
        each = (whole + SPLITS - 1) // SPLITS * LOOK
        for head in range(HEADS):
            for split in range(SPLITS):
                first, last = min(split * each, n), min((split + 1) * each, n)
                found = (torch.rand(last - first) < 0.7).nonzero()[:, 0] + first
                ids[row, head, first : first + len(found)] = found.int()
                count[row, head, split, 0] = len(found)
    return Chosen(ids, later, count, tokens, LOOK)


@pytest.mark.parametrize(("stay", "most"), [(0, 200), (8, 200), (10, 7), (1000, 200)])
def test_deal(stay: int, most: int) -> None:
    torch.manual_seed(stay)
    given = chosen()
    before = given.count.clone()
    moved = [x.to(DEVICE, copy=True) for x in (given.ids, given.later, given.count, given.tokens)]
    there = Chosen(moved[0], moved[1], moved[2], moved[3], LOOK)
    lists = [torch.full((ROWS, HEADS, most), -1, dtype=torch.int32, device=d) for d in ("cpu", DEVICE)]
    counts = [torch.zeros(ROWS, HEADS, dtype=torch.int32, device=d) for d in ("cpu", DEVICE)]
    plain.deal(given, torch.tensor([stay], dtype=torch.int32), lists[0], counts[0])
    kernel.deal(there, torch.tensor([stay], dtype=torch.int32, device=DEVICE), lists[1], counts[1])
    assert torch.equal(given.count, there.count.cpu())
    assert torch.equal(counts[0], counts[1].cpu())
    assert torch.equal(lists[0], lists[1].cpu())
    assert torch.equal(given.later, there.later.cpu())
    assert torch.equal(before[..., 0].sum(-1), given.count[..., 0].sum(-1) + counts[0])
    gone = before[..., 0] - given.count[..., 0]
    assert torch.equal(given.count[..., 1], (before[..., 1] + gone).clamp(max=16))
    assert int(counts[0].max()) <= most
    if most == 200:
        assert int(given.count[..., 0].max()) <= -(-stay // SPLITS)
    for row in range(ROWS):
        for head in range(HEADS):
            taken = lists[0][row, head, : int(counts[0][row, head])].tolist()
            assert sorted(set(taken)) == taken
            assert all(token >= 0 for token in taken)
