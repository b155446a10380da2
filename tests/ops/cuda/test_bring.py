"""Rows by bulk copies against PyTorch."""

from __future__ import annotations

import pytest
import torch

from coattn.ops.cuda import bring as cuda
from coattn.ops.cuda import nvrtc
from coattn.ops.cuda.nvrtc import FOLDER
from coattn.ops.token_pool import FRESH, NONE, Moves, TokenPool, bring

BLOCK, HEADS = 32, 3


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("moves", [0, 1])
def test_compiles(moves: int) -> None:
    form = {"ROW": 256, "BLOCK": BLOCK, "FRESH": FRESH, "MOVES": moves, "STAGES": cuda.STAGES}
    assert nvrtc.compile_cubin((FOLDER / "bring.cu").read_text(), form, "sm_90")


def test_refused_without_a_gpu() -> None:
    memory = torch.zeros(2, HEADS, 2, BLOCK, 64)
    assert cuda.refuses(memory, memory) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 128), (torch.float32, 64), (torch.float32, 128)])
@pytest.mark.parametrize("moved", [False, True])
def test_rows_are_where_the_books_say(dtype: torch.dtype, d: int, moved: bool) -> None:
    torch.manual_seed(3)
    rows, blocks, width, places = 3, 9, 6, 128
    memory = torch.randn(blocks, HEADS, 2, BLOCK, d).to(dtype).pin_memory()
    table = torch.randint(0, blocks, (rows, width), dtype=torch.int32)
    seq = torch.tensor([2, 3, 0], dtype=torch.int32)  # the second is padding
    pool = TokenPool.make(torch.zeros(4 * 4 + 2, HEADS, 2, BLOCK, d, dtype=dtype), 2, 4, width * BLOCK, places, HEADS)
    count = torch.tensor([[100, 0, 17], [5, 5, 5], [1, 128, 40]], dtype=torch.int32)
    tokens, to = (torch.full((rows, HEADS, FRESH), NONE, dtype=torch.int32) for _ in range(2))
    for row in range(rows):
        for head in range(HEADS):
            n = int(count[row, head])
            tokens[row, head, :n] = torch.randint(0, width * BLOCK, (n,))
            to[row, head, :n] = torch.randperm(places)[:n]
    pool.coming[seq.long()], pool.next[seq.long()], pool.ends[seq.long()] = tokens, to, count
    pool.began[seq.long()] = 7
    moves = Moves(tokens, to, count) if moved else None
    there = TokenPool(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in vars(pool).values()))
    if cuda.refuses(memory, there.gpu) is not None:
        pytest.skip("made for other GPUs")
    bring(pool, memory, table, seq, moves)
    cuda.bring(there, memory, table.cuda(), seq.cuda(), None if moves is None else Moves(*(x.cuda() for x in moves)))
    assert int((pool.gpu != 0).sum()) > 0
    assert there.gpu.cpu().equal(pool.gpu)
