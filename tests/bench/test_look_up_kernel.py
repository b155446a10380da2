"""Tokens that are put in as looked up: as many as was said, of the pool, behind what was chosen."""

from __future__ import annotations

import pytest
import torch

from coattn.ops.attend_scored import Chosen
from coattn.ops.token_pool import TokenPool
from coattn.types import ScoredWork

pytest.importorskip("triton")
from coattn.bench.look_up_kernel import LookUp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SPLITS, LOOK, D = 2, 4, 8, 16


def test_so_many_of_the_pool_behind_what_was_chosen() -> None:
    torch.manual_seed(0)
    n = 128
    pool = TokenPool.make(torch.zeros(24, HEADS, 2, 8, D), 0, 3, n, 64, HEADS, packed=True)
    for slot in range(2):
        tokens = torch.stack([torch.randperm(n)[:64] for _ in range(HEADS)])
        pool.fill(slot, tokens, torch.randn(HEADS, 64, D), torch.randn(HEADS, 64, D))
    tokens, seq = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([120, 40, 90], [1, 0, 2]))
    ids = torch.full((3, HEADS, n), -7, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(3, HEADS, SPLITS, 3, dtype=torch.int32, device=DEVICE)
    count[..., 0], count[..., 2] = 3, 9
    later = torch.empty(3, HEADS, SPLITS, 4, dtype=torch.int32, device=DEVICE)
    there = TokenPool(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in vars(pool).values()))
    none = torch.empty(0, device=DEVICE)
    work = ScoredWork(none, tokens, none, none, none, seq, there, 0.0)
    LookUp(50)(work, Chosen(ids, later, count, tokens, LOOK))
    # 120 tokens are four splits of 32, of which the last has 24; 40 are two of 16 and one of 8: there is room for less
    assert count[0, :, :, 2].tolist() == [[13, 13, 12, 12]] * HEADS
    assert count[1, :, :, 2].tolist() == [[13, 13, 5, 0]] * HEADS
    assert (count[2, ..., 2] == 9).all()  # a padding row
    assert (count[..., 0] == 3).all()
    drawn = ids[0, 1, 32 - 13 : 32].cpu().long()
    assert (pool.place_of[1, 1, drawn] >= 0).all()
    assert len(set(drawn.tolist())) > 6
    assert (ids[0, :, :19] == -7).all()
    assert (ids[1, :, 40:] == -7).all()
    assert (ids[2] == -7).all()
