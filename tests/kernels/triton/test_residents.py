"""The kernels of a decode step with residents against their references."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.kernels.digest import Scores, digest, score_parts
from coattn.kernels.lists import Lists, Residents, Rows
from coattn.kernels.pick_blocks import pick_blocks
from coattn.kernels.renew import Due, renew

pytest.importorskip("triton")
from coattn.kernels.triton import digest as score_kernel
from coattn.kernels.triton import handover
from coattn.kernels.triton import pick_blocks as pick_kernel
from coattn.kernels.triton import renew as renew_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, BLOCK, D, RING, SLOTS, PLACES = 2, 8, 16, 2, 3, 5
FIRST = SLOTS * RING + 1


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def whole(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def world(n: int) -> tuple[Rows, Residents]:
    """Three rows: a long sequence, one with fewer blocks than are picked, and nobody's."""
    host = torch.stack([torch.randperm(200, generator=torch.Generator().manual_seed(i))[:n] for i in range(3)])
    held = torch.full((SLOTS + 1, HEADS, PLACES), -1, dtype=torch.int32)
    held[2, 0] = torch.tensor([n - 1, 3, 0, -1, 7])
    held[2, 1] = torch.tensor([1, 2, 4, 5, 6])
    held[0, 0, :2] = torch.tensor([1, 0])
    few = min(3, n)
    return Rows(
        host.int().to(DEVICE), whole([n * BLOCK, few * BLOCK, 0]), whole([[0, 1], [4, 5], [6, 6]]), whole([9, 16, 0]),
        whole([2, 0, SLOTS]), whole([1, 5, 6]), whole([-1, 150, -1]),
    ), Residents(held.to(DEVICE), FIRST, BLOCK, 2)  # fmt: skip


def lists(count: int) -> Lists:
    sizes = (max(count, PLACES) + RING, 0, count, 0, count, count, PLACES)
    made = [torch.zeros((3, HEADS, s) if s else (3, HEADS), dtype=torch.int32, device=DEVICE) for s in sizes]
    return Lists(*made[:5], made[5].float(), made[6].float())


def same(a: Lists, b: Lists) -> None:
    for name in (field.name for field in fields(Lists)):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4)


def picks(scores: Scores, rows: Rows, pool: Residents, count: int) -> Lists:
    """The kernel's, which are the reference's."""
    got, want = lists(count), lists(count)
    pick_kernel.pick_blocks(scores, rows, pool, got)
    pick_blocks.reference(scores, rows, pool, want)
    same(got, want)
    return got


@pytest.mark.parametrize(
    ("group", "n", "slack", "softcap"), [(1, 9, 1.0, None), (3, 64, 0.5, 20.0), (5, 150, 0.5, None)]
)
def test_score_parts(group: int, n: int, slack: float, softcap: float | None) -> None:
    rows, _ = world(n)
    digests = digest(draw(200, HEADS, 4, D, seed=1))
    ask = (draw(3, HEADS * group, D), digests, rows.host_blocks, rows.host_lens, BLOCK, 0.3, softcap, slack)
    got, want = score_kernel.score_parts(*ask), score_parts.reference(*ask)
    there = torch.arange(n, device=DEVICE) < rows.host_lens[:, None] // BLOCK
    torch.testing.assert_close(
        got.blocks.masked_fill(~there[:, None, None], 0.0), want.blocks.masked_fill(~there[:, None, None], 0.0)
    )
    torch.testing.assert_close(got.sums, want.sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("group", "n", "count"), [(1, 9, 4), (3, 70, 12), (5, 150, 60), (2, 9, 9)])
def test_pick_blocks(group: int, n: int, count: int) -> None:
    rows, pool = world(n)
    digests = digest(draw(200, HEADS, 4, D, seed=1))
    q = draw(3, HEADS * group, D)
    scores = score_parts.reference(q, digests, rows.host_blocks, rows.host_lens, BLOCK, 0.3, None, 0.5)
    want = picks(scores, rows, pool, count)
    missed = want.host_lens // BLOCK
    assert missed[0].sum() > 0
    assert want.chosen[0, :, : pool.sinks].tolist() == [[0, 1]] * HEADS
    # of one head's places one is empty; the window follows
    assert want.gpu_lens[0].tolist() == [4 * BLOCK + 9, 5 * BLOCK + 9]
    assert want.gpu_lens[1, 0] == 2 * BLOCK + 16
    assert want.gpu[0, 1, :7].tolist() == [FIRST + 2 * PLACES + p for p in range(PLACES)] + [0, 1]
    assert want.gpu_lens[2].tolist() == want.host_lens[2].tolist() == [0, 0]


def test_of_equal_scores_the_older_are_picked() -> None:
    rows, pool = world(20)
    scores = Scores(torch.zeros(3, HEADS, 1, 20, device=DEVICE), torch.zeros(3, HEADS, 1, 1, device=DEVICE))
    scores.blocks[..., 11] = 1
    scores.blocks[..., 15] = -1
    got = picks(scores, rows, pool, 6)
    assert got.chosen[0, 0].tolist() == [0, 1, 2, 3, 4, 11]


@pytest.mark.parametrize(("interval", "shift"), [(0, 0), (1, 3), (7, 1)])
def test_renew(interval: int, shift: int) -> None:
    n, count = 30, 12
    rows, pool = world(n)
    picked = lists(count)
    digests = digest(draw(200, HEADS, 4, D, seed=1))
    scores = score_parts.reference(
        draw(3, HEADS * 2, D), digests, rows.host_blocks, rows.host_lens, BLOCK, 0.3, None, 1.0
    )
    pick_blocks.reference(scores, rows, pool, picked)
    results = []
    for run in (renew_kernel.renew, renew.reference):
        gpu, host = (draw(blocks, HEADS, 2, BLOCK, D, seed=i) for i, blocks in enumerate((FIRST + SLOTS * PLACES, 200)))
        own = Residents(pool.held.clone(), FIRST, BLOCK)
        memory, moved = digests.clone(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        run(gpu, host, memory, rows, own, picked, Due(interval, shift), moved)
        results.append((gpu, memory, moved, own.held))
    (gpu, memory, moved, held), want = results
    torch.testing.assert_close(results[0], want)
    # the length of the first row is 30 * 8 + 9: due every step, and 249 + 1 is no multiple of 7
    assert bool(moved > 0) == (interval == 1)
    assert (held[0, :] == 4).sum() == HEADS  # the full block of the second row: 24 + 16 tokens
    assert not torch.equal(memory[150], digests[150])
    for head in range(HEADS):
        for place, number in enumerate(held[2, head].tolist()):
            if number >= 0 and interval == 1 and number not in pool.held[2, head].tolist():
                _, host = (draw(x, HEADS, 2, BLOCK, D, seed=i) for i, x in enumerate((FIRST + SLOTS * PLACES, 200)))
                assert torch.equal(gpu[FIRST + 2 * PLACES + place, head], host[rows.host_blocks[0, number], head])


def test_an_answer_comes_near_but_for_empty_lists() -> None:
    out, lse = draw(2, 3, 24), draw(2, 3, seed=1)
    lse[1, 2] = -torch.inf
    here = torch.zeros_like(out), torch.zeros_like(lse)
    handover.receive(out, lse, *here)
    assert torch.equal(here[1], lse)
    assert torch.equal(here[0].flatten(0, 1)[:5], out.flatten(0, 1)[:5])
    assert not here[0][1, 2].any()


def test_digests_of_sixteen_bits_are_scored_as_well_as_others() -> None:
    q, keys = draw(2, 6, 64), draw(40, 2, 4, 64, seed=1).half()
    table = torch.arange(40, dtype=torch.int32, device=DEVICE).repeat(2, 1)
    digests = digest(keys)
    ask = (table, whole([40, 40]), 1, 1.0, None, 0.5)
    got, want = score_kernel.score_parts(q, digests, *ask), score_parts.reference(q, digests.float(), *ask)
    torch.testing.assert_close(got.blocks, want.blocks, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("n", "count", "steps"), [(190, 62, 3), (190, 189, 2), (77, 5, 1), (128, 64, 50)])
def test_picks_among_many_equal_scores(n: int, count: int, steps: int) -> None:
    rows, pool = world(n)
    coarse = (draw(3, HEADS, 1, n, seed=n) * steps).round() / steps
    scores = Scores(coarse, torch.zeros(3, HEADS, 1, -(-n // 64), device=DEVICE))
    picks(scores, rows, pool, count)
