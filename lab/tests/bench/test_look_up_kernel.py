"""Tokens that are put in as looked up: as many as was said, of the pool."""

from __future__ import annotations

import pytest
import torch

from coattn.auto.pool import TokenPool
from coattn.kernels.pool_memory import PoolTensors
from coattn.kernels.scored_entries import ScoredEntries

pytest.importorskip("triton")
from coattn_lab.bench.look_up_kernel import LookUp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, D = 2, 16


def test_so_many_of_the_pool() -> None:
    torch.manual_seed(0)
    n = 128
    pool = PoolTensors.make(torch.zeros(24, HEADS, 2, 8, D), 0, 3, n, 64, HEADS, packed=True)
    for slot in range(2):
        tokens = torch.stack([torch.randperm(n)[:64] for _ in range(HEADS)])
        TokenPool(pool).fill(slot, tokens, torch.randn(HEADS, 64, D), torch.randn(HEADS, 64, D))
    tokens, seq = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([120, 40, 90], [1, 0, 2]))
    there = PoolTensors(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in vars(pool).values()))
    none = torch.empty(0, device=DEVICE)
    found = LookUp(50)(ScoredEntries(none, tokens, none, none, none, seq), there)()
    assert found.count[:2, ..., 2].tolist() == [[[4, 4] + [3] * 14] * HEADS] * 2
    assert (found.count[2, ..., 2] == 0).all()  # a padding row
    assert found.look * 16 == found.ids.shape[2] == found.tokens[0]
    # each piece from its last token's place back, as what is chosen lies
    drawn = found.ids[0, 1].view(16, -1).cpu()
    some = torch.cat([drawn[0], drawn[1], drawn[2:, 1:].flatten()]).long()
    assert (pool.place_of[1, 1, some] >= 0).all()
    assert len(set(some.tolist())) > 25
