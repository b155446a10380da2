"""SnapKV: what a prompt's last queries weigh most stays, what they do not is never attended again."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.methods import fetched
from tests.methods.fetched import DIM, GROUP, HEADS, KV_HEADS, LAYERS, SCALE
from torch import Tensor

from coattn.errors import MethodError
from coattn.method.row import Method, compose
from coattn.method.table import METHODS
from coattn.types import Step

SNAPKV = METHODS["snapkv"]
SMALL = {"budget": 16, "window": 5, "kernel": 3}


class World(fetched.World):
    """All of its entries lie in GPU memory."""

    def __init__(self, method: Method = SNAPKV, seqs: int = 3, **more: Any) -> None:
        super().__init__(method, seqs, **more)

    def picked(self, slot: int, layer: int) -> list[list[int]]:
        """By KV head: positions that the last decode step attended to."""
        near: Any = self.runtime.groups[0].cache.gpu
        length, found = self.lengths[slot], self.probe.by_layer[layer].gpu
        here, own = {near.place(slot, p)[0]: p for p in range(near.first(length), length)}, found.in_reach(slot + 1)
        table, tokens = (x.expand(-1, KV_HEADS, *x.shape[2:])[slot] for x in (own.table, own.tokens))
        return [[here[b] for b in ids[:count]] for ids, count in zip(table.tolist(), tokens.tolist(), strict=True)]

    positions = picked


def slow(q: Tensor, k: Tensor, window: int, kernel: int, cap: float | None = None) -> list[list[float]]:
    """The rule's scores, number by number: q `[n, q_heads, d]`, k `[n, kv_heads, d]` of a prompt -> by KV head."""
    n, found = len(k), []
    for kv_head in range(KV_HEADS):
        scores = [0.0] * (n - window)
        for head in range(GROUP * kv_head, GROUP * (kv_head + 1)):
            total = [0.0] * (n - window)
            for asking in range(n - window, n):
                dots = (k[: asking + 1, kv_head].double() @ q[asking, head].double()) * SCALE
                dots = dots if cap is None else cap * (dots / cap).tanh()
                weights = (dots.exp() / dots.exp().sum()).tolist()
                total = [old + weights[p] for p, old in enumerate(total)]
            for p in range(n - window):
                scores[p] += max(total[max(0, p - kernel // 2) : p + kernel // 2 + 1]) / GROUP
        found.append(scores)
    return found


def assert_the_best(positions: list[int], scores: list[float], budget: int, window: int, end: int) -> None:
    """`budget - window` of the positions that have scores, none worse than one left out, and all from there to `end`.

    Neighbours that are pooled to one maximum are as good as each other.
    """
    older = budget - window
    assert positions == sorted(set(positions))
    assert positions[older:] == [*range(len(scores), end)]
    left_out = set(range(len(scores))) - set(positions[:older])
    assert min(scores[p] for p in positions[:older]) >= max(scores[p] for p in left_out) - 1e-6


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("kernel", [1, 7])
def test_keeps_what_the_slow_rule_keeps_and_all_that_follows(kernel: int, softcap: float | None) -> None:
    world = World(softcap=softcap, budget=16, window=5, kernel=kernel)
    world.step(40, 30, 13)
    world.step(3, 0, 0)  # a later chunk of the first prompt, shorter than the window
    scores = [[slow(*world.kept[slot][layer][:2], 5, kernel, softcap) for layer in range(LAYERS)] for slot in range(2)]
    for _ in range(12):
        outs = world.step(1, 1, 1)
        for layer, slot in itertools.product(range(LAYERS), range(3)):
            found, length = world.picked(slot, layer), world.lengths[slot]
            for head, own in enumerate(found):
                if slot < 2:
                    assert_the_best(own, scores[slot][layer][head], 16, 5, length)
                else:
                    assert own == [*range(length)], "a prompt within the budget is kept, and grows beyond it"
            wanted = world.attended(slot, layer)
            torch.testing.assert_close(outs[layer][slot].double(), wanted, atol=1e-5, rtol=1e-5)


def prompt(tokens: int, **at: int) -> tuple[Tensor, Tensor, Tensor, dict[str, int]]:
    """Queries of zero, small keys, and by name a position whose key points in a direction of its own, its value too."""
    draws = torch.Generator().manual_seed(2)
    q, k = torch.zeros(tokens, HEADS, DIM), 0.1 * torch.randn(tokens, KV_HEADS, DIM, generator=draws)
    v = torch.zeros(tokens, KV_HEADS, DIM)
    ways = {name: i for i, name in enumerate(at)}
    for name, position in at.items():
        k[position, :, ways[name]] = v[position, :, ways[name]] = 20.0
    return q, k, v, ways


def asking(way: int, tokens: int = 1) -> dict[str, Tensor]:
    """Tokens that ask for what lies in a direction, and have nothing themselves."""
    q = torch.zeros(tokens, HEADS, DIM)
    q[:, :, way] = 2.0
    return {"q": q, **{name: torch.zeros(tokens, KV_HEADS, DIM) for name in "kv"}}


def test_what_the_last_queries_point_at_stays_and_a_needle_for_a_later_query_is_lost() -> None:
    q, k, v, ways = prompt(100, asked=23, needle=61)
    q[-5:, :, ways["asked"]] = 2.0
    world, full = World(seqs=1, **SMALL), World(METHODS["full"], seqs=1)
    for each in (world, full):
        each.step(100, q=q, k=k, v=v)
    for name, found in (("asked", True), ("needle", False)):
        own, everything = (each.step(1, **asking(ways[name]))[0][0] for each in (world, full))
        assert everything[:, ways[name]].min() > 19
        assert (own[:, ways[name]].min() > 19) == found
        assert all((23 in head) and (61 not in head) for head in world.picked(0, 0))


def test_pooling_keeps_what_lies_around_a_peak() -> None:
    q, k, v, ways = prompt(100, asked=23)
    q[-5:, :, ways["asked"]] = 2.0
    world = World(seqs=1, budget=12, window=5)
    world.step(100, q=q, k=k, v=v)
    world.step(1, **asking(ways["asked"]))
    assert world.picked(0, 1)[0] == [*range(20, 27), *range(95, 101)]


def test_a_turn_reads_everything_and_chooses_afresh() -> None:
    q, k, v, ways = prompt(100, asked=23, needle=61)
    q[-5:, :, ways["asked"]] = 2.0
    world = World(seqs=1, **SMALL)
    world.step(100, q=q, k=k, v=v)
    world.step(1)
    turn = world.step(3, **asking(ways["needle"], 3))[0]
    assert turn[:, :, ways["needle"]].min() > 19
    assert world.step(1, **asking(ways["needle"]))[0][0, :, ways["needle"]].min() > 19
    assert all(61 in head and len(head) == 17 for head in world.picked(0, 0))


def test_answers_taken_back_change_nothing_and_a_prompt_taken_back_is_attended_whole() -> None:
    world = World(seqs=1, **SMALL)
    world.step(60)
    for _ in range(4):
        world.step(1)
    chosen = world.picked(0, 1)
    world.take_back(0, 4)
    world.step(1)
    assert world.picked(0, 1) == [head[:17] for head in chosen]
    world.take_back(0, 2)
    world.step(1)
    assert world.picked(0, 1) == [[*range(60)]] * KV_HEADS
    world.step(2)
    world.step(1)
    assert [len(head) for head in world.picked(0, 1)] == [17] * KV_HEADS


@pytest.mark.parametrize("back", [True, False])
def test_a_slot_that_another_sequence_takes_over_starts_anew(back: bool) -> None:
    world = World(seqs=1, **SMALL)
    world.step(60)
    world.step(1)
    if back:
        world.take_back(0, 61)
    else:
        world.lengths = [0]
        world.kept[0] = [[x[:0] for x in layer] for layer in world.kept[0]]
    world.step(14)
    world.step(1)
    assert world.picked(0, 0) == [[*range(15)]] * KV_HEADS


def test_queries_that_nobody_knows_leave_nothing_out() -> None:
    world = World(seqs=1, **SMALL)
    running = world.runtime.begin(Step.of((0,), (0,), (60,)))
    for layer in range(LAYERS):
        made = [torch.randn(60, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        world.kept[0][layer] = made
        world.runtime.import_kv(running, layer, *made[1:], None, SCALE)
    world.runtime.commit(running)
    world.lengths = [60]
    world.step(1)
    assert world.picked(0, 0) == [[*range(61)]] * KV_HEADS


def test_what_is_kept_stays_at_its_address_in_an_engine() -> None:
    world = World(seqs=2, fixed=True, **SMALL)
    maintenance: Any = world.runtime.groups[0].maintenance
    before = [maintenance.gone.data_ptr(), *(rows.data_ptr() for rows in maintenance.kept.values())]
    world.step(100, 37)
    world.step(1, 1)
    assert [maintenance.gone.data_ptr(), *(rows.data_ptr() for rows in maintenance.kept.values())] == before


def test_the_report_counts_what_is_attended() -> None:
    world = World(seqs=2, **SMALL)
    world.step(60, 14)
    world.step(1, 1)
    assert world.runtime.attended(Step.of((0, 1), (60, 14), (1, 1))) == (17 + 15, 0)
    assert all(len(head) == 17 for layer in range(2) for head in world.picked(0, layer))


def test_rule_and_maintenance_come_together() -> None:
    for row, words in (
        (replace(SNAPKV, maintenance="none"), "positions of a prompt"),
        (replace(SNAPKV, select="oracle"), "prompt_top"),
    ):
        with pytest.raises(MethodError, match=words):
            compose(row)
