"""The kernels of a recorded step with residents against their references."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.ops.lists import Lists, Residents, Rows
from coattn.ops.reference import look_again as look_again_reference
from coattn.ops.reference import pick_blocks as pick_reference
from coattn.ops.reference import renew as renew_reference
from coattn.ops.reference.digest import digest
from coattn.ops.reference.digest import score_digest as score_digest_reference
from coattn.ops.reference.drive import Drift, Driven, drive
from coattn.ops.reference.look_again import Doubts
from coattn.ops.reference.pick_blocks import Scores
from coattn.ops.reference.renew import Digests, Due
from coattn.state import AttnState, Other, Split, merge
from coattn.types import BlockList

pytest.importorskip("triton")
from coattn.ops.triton import handover
from coattn.ops.triton import look_again as look_again_kernel
from coattn.ops.triton import merge as merge_kernel
from coattn.ops.triton import pick_blocks as pick_kernel
from coattn.ops.triton import renew as renew_kernel
from coattn.ops.triton import score_digest as score_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, BLOCK, D, RING, SLOTS, PLACES = 2, 8, 16, 2, 3, 5
FIRST = SLOTS * RING + 1


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def whole(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def world(n: int) -> tuple[Rows, Residents]:
    """Three rows: a long sequence, one with fewer blocks than are picked, and nobody's."""
    far = torch.stack([torch.randperm(200, generator=torch.Generator().manual_seed(i))[:n] for i in range(3)])
    held = torch.full((SLOTS + 1, HEADS, PLACES), -1, dtype=torch.int32)
    held[2, 0] = torch.tensor([n - 1, 3, 0, -1, 7])
    held[2, 1] = torch.tensor([1, 2, 4, 5, 6])
    held[0, 0, :2] = torch.tensor([1, 0])
    few = min(3, n)
    return Rows(
        far.int().to(DEVICE), whole([n * BLOCK, few * BLOCK, 0]), whole([[0, 1], [4, 5], [6, 6]]), whole([9, 16, 0]),
        whole([2, 0, SLOTS]), whole([1, 5, 6]), whole([-1, 150, -1]),
    ), Residents(held.to(DEVICE), FIRST, BLOCK, 2)  # fmt: skip


def lists(count: int) -> Lists:
    sizes = (max(count, PLACES) + RING, 0, count, 0, count, count, PLACES)
    made = [torch.zeros((3, HEADS, s) if s else (3, HEADS), dtype=torch.int32, device=DEVICE) for s in sizes]
    return Lists(*made[:5], made[5].float(), made[6].float())


def same(a: Lists, b: Lists) -> None:
    for name in (field.name for field in fields(Lists)):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "n", "slack", "softcap"), [(1, 9, 1.0, None), (3, 64, 0.5, 20.0), (5, 150, 0.5, None)]
)
def test_score_parts(group: int, n: int, slack: float, softcap: float | None) -> None:
    rows, _ = world(n)
    digests = digest(draw(200, HEADS, 4, D, seed=1), "minmax")
    ask = (draw(3, HEADS * group, D), digests, rows.far, rows.far_tokens, BLOCK, 0.3, softcap, slack)
    got, want = score_kernel.score_parts(*ask), pick_reference.score_parts(*ask)
    there = torch.arange(n, device=DEVICE) < rows.far_tokens[:, None] // BLOCK
    torch.testing.assert_close(
        got.blocks.masked_fill(~there[:, None, None], 0.0), want.blocks.masked_fill(~there[:, None, None], 0.0)
    )
    torch.testing.assert_close(got.sums, want.sums, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "n", "count", "ahead", "driven", "all_of_it"),
    [
        *((3, 70, 12, *flags) for flags in product((False, True), repeat=3)),
        (1, 9, 4, False, False, False),
        (2, 9, 9, True, False, True),
        (5, 150, 60, True, True, False),
        (5, 150, 60, False, False, True),
    ],
)
def test_pick_blocks(group: int, n: int, count: int, ahead: bool, driven: bool, all_of_it: bool) -> None:
    rows, pool = world(n)
    pool = replace(pool, whole=all_of_it)
    digests = digest(draw(200, HEADS, 4, D, seed=1), "minmax")
    q = draw(3, HEADS * group, D)
    scores = pick_reference.score_parts(q, digests, rows.far, rows.far_tokens, BLOCK, 0.3, None, 0.5)
    other = Driven(Drift(0.4, 50, 0.3), 3) if driven else None
    got, want = lists(count), lists(count)
    pick_kernel.pick_blocks(scores, rows, pool, got, ahead, other)
    pick_reference.pick_blocks(scores, rows, pool, want, ahead, other)
    same(got, want)
    missed = want.far_tokens // BLOCK
    assert missed[0].sum() > 0
    assert want.chosen[0, :, : pool.sinks].tolist() == [[0, 1]] * HEADS
    if all_of_it:
        # block n - 1 is far, -1 is none; the window follows
        assert want.near_tokens[0].tolist() == [4 * BLOCK + 9, 5 * BLOCK + 9]
        assert want.near_tokens[1, 0] == 2 * BLOCK + 16
        assert want.near[0, 1, :7].tolist() == [FIRST + 2 * PLACES + p for p in range(PLACES)] + [0, 1]
    elif not ahead:
        # what is attended near without the window, and far, is what was picked
        assert torch.equal(want.near_tokens[0] - 9 + want.far_tokens[0], whole([min(count, n) * BLOCK] * HEADS))
        assert torch.equal(want.near_tokens[2], whole([0, 0]))


def test_of_equal_scores_the_older_are_picked() -> None:
    rows, pool = world(20)
    scores = Scores(torch.zeros(3, HEADS, 1, 20, device=DEVICE), torch.zeros(3, HEADS, 1, 1, device=DEVICE))
    scores.blocks[..., 11] = 1
    scores.blocks[..., 15] = -1
    got, want = lists(6), lists(6)
    pick_kernel.pick_blocks(scores, rows, pool, got, False)
    pick_reference.pick_blocks(scores, rows, pool, want, False)
    same(got, want)
    assert got.chosen[0, 0].tolist() == [0, 1, 2, 3, 4, 11]


@pytest.mark.parametrize("kind", ["minmax", "mean"])
@pytest.mark.parametrize(("interval", "shift"), [(0, 0), (1, 3), (7, 1)])
def test_renew(kind: str, interval: int, shift: int) -> None:
    n, count = 30, 12
    rows, pool = world(n)
    picked = lists(count)
    digests = digest(draw(200, HEADS, 4, D, seed=1), "minmax")
    scores = pick_reference.score_parts(
        draw(3, HEADS * 2, D), digests, rows.far, rows.far_tokens, BLOCK, 0.3, None, 1.0
    )
    pick_reference.pick_blocks(scores, rows, pool, picked, False)
    results = []
    for run in (renew_kernel.renew, renew_reference.renew):
        near, far = (draw(blocks, HEADS, 2, BLOCK, D, seed=i) for i, blocks in enumerate((FIRST + SLOTS * PLACES, 200)))
        own = Residents(pool.held.clone(), FIRST, BLOCK)
        memory, moved = digests.clone(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        run(near, far, Digests(memory, kind), rows, own, picked, Due(interval, shift), moved)
        results.append((near, memory, moved, own.held))
    (near, memory, moved, held), want = results
    for a, b in zip(results[0], want, strict=True):
        torch.testing.assert_close(a, b)
    # the length of the first row is 30 * 8 + 9: due every step, and 249 + 1 is no multiple of 7
    assert bool(moved > 0) == (interval == 1)
    assert (held[0, :] == 4).sum() == HEADS  # the full block of the second row: 24 + 16 tokens
    assert not torch.equal(memory[150], digests[150])
    for head in range(HEADS):
        for place, number in enumerate(held[2, head].tolist()):
            if number >= 0 and interval == 1 and number not in pool.held[2, head].tolist():
                _, far = (draw(x, HEADS, 2, BLOCK, D, seed=i) for i, x in enumerate((FIRST + SLOTS * PLACES, 200)))
                assert torch.equal(near[FIRST + 2 * PLACES + place, head], far[rows.far[0, number], head])


@pytest.mark.parametrize("shared", [False, True])
def test_look_again(shared: bool) -> None:
    group, width = 3, 70
    real = draw(3, HEADS * group, D)
    predicted = real.clone()
    predicted[0, 4] = draw(D, seed=8)  # one query head of the second KV head
    predicted[1, 0] = draw(D, seed=7)
    predicted[2] = draw(HEADS * group, D, seed=9)  # nobody's
    table = torch.randint(99, (3, 1 if shared else HEADS, width), generator=torch.Generator().manual_seed(1)).int()
    far = BlockList(table.to(DEVICE), whole([[520], [8], [16]] if shared else [[8, 520], [0, 8], [8, 16]]), width * 8)
    made = []
    for run in (look_again_kernel.look_again, look_again_reference.look_again):
        doubts = Doubts(
            whole([[[7] * width] * HEADS] * 3), whole([[9] * HEADS] * 3), whole([[9] * HEADS] * 3),
            whole([3]), whole([5]), torch.zeros(2, dtype=torch.int64, device=DEVICE),
        )  # fmt: skip
        run(predicted, real, 0.8, whole([4, 4, 0]), far, doubts)
        made.append(doubts)
    got, want = made
    for name in ("tokens", "below", "needed", "counts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.below.tolist() == [[0, 1], [1 if shared else 2, 0], [0, 0]]
    assert got.counts.tolist() == [4, 2]
    assert got.needed.tolist() == [5]
    assert got.tokens.tolist() == [[0, 520], [8 if shared else 0, 0], [0, 0]]
    assert torch.equal(got.table[0, 1, :65], far.table[0, -1, :65])
    none = replace(got, needed=whole([3]))
    look_again_kernel.look_again(real, real, 0.8, whole([4, 4, 0]), far, none)
    assert none.needed.tolist() == [3]


def test_merge_takes_the_other_piece_where_it_is_told() -> None:
    q_heads, group = 6, 3
    near = Split(draw(2, 4, q_heads, D), draw(2, 4, q_heads, seed=1))
    first, second = (AttnState(draw(2, 1, q_heads, D, seed=i), draw(2, 1, q_heads, seed=i + 1)) for i in (2, 4))
    first.lse[0, 0, 0] = -torch.inf
    first.out[0, 0, 0] = torch.nan  # of an empty piece nothing is read
    heads = whole([[0, 1], [1, 2]])
    second.out[1, 0, 3:] = torch.nan  # left over from another step, for heads that asked for nothing
    got = merge_kernel.merge(
        [near, Split(first.out, first.lse, Other(second.out, second.lse, heads))], torch.float32, DEVICE
    )
    which = heads.repeat_interleave(group, 1)[:, None]
    out = torch.where((which > 0)[..., None], second.out, first.out).nan_to_num(0.0)
    lse = torch.where(which > 0, second.lse, first.lse).masked_fill(which > 1, -torch.inf)
    want = merge(near.merged(), AttnState(out, lse)).out[:, 0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    clean = Split(first.out.nan_to_num(0.0), first.lse, Other(second.out, second.lse, heads))
    torch.testing.assert_close(merge(near.merged(), clean.merged()).out[:, 0], want, atol=1e-5, rtol=1e-5)


def test_driven_picks_change_with_every_step_and_with_predictions() -> None:
    rows, _ = world(150)
    drift = Drift(0.3, 40, 0.2)
    now = drive(rows, HEADS, Driven(drift, 7), False)
    later = drive(replace(rows, window_tokens=rows.window_tokens + 1), HEADS, Driven(drift, 7), False)
    guessed = drive(rows, HEADS, Driven(drift, 7), True)
    assert not torch.isclose(now, later).any()
    assert 0.1 < 1 - torch.isclose(now, guessed).float().mean() < 0.3
    assert not torch.isclose(now, drive(rows, HEADS, Driven(drift, 8), False)).any()


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
    digests = digest(keys, "minmax")
    got = score_kernel.score_digest(q, digests, table, 0.5)
    torch.testing.assert_close(got, score_digest_reference(q, digests.float(), table, 0.5), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("n", "count", "steps"), [(190, 62, 3), (190, 189, 2), (77, 5, 1), (128, 64, 50)])
def test_picks_among_many_equal_scores(n: int, count: int, steps: int) -> None:
    rows, pool = world(n)
    coarse = (draw(3, HEADS, 1, n, seed=n) * steps).round() / steps
    scores = Scores(coarse, torch.zeros(3, HEADS, 1, -(-n // 64), device=DEVICE))
    got, want = lists(count), lists(count)
    pick_kernel.pick_blocks(scores, rows, pool, got, False)
    pick_reference.pick_blocks(scores, rows, pool, want, False)
    same(got, want)
