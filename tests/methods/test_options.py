"""Options that the papers' rows do not have: each beside a slow re-statement, and off where a row is as published."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
import torch
from tests.engine.small import greedy, llm, prompt
from tests.methods.fetched import GROUP, HEADS, KV_HEADS, LAYERS, SCALE, World
from tests.methods.test_pqcache import PIECE, SMALL, books
from torch import Tensor

from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.index.averages import Averages
from coattn.parts.index.heard import QUERIES
from coattn.parts.maintenance.entries.entries import Entries
from coattn.parts.select.maw_threshold import MawThreshold

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("hgca", {"neighbours": 2}),
    ("hgca", {"top_p": 0.7}),
    ("hgca", {"renew": 3}),
    ("hgca", {"tail": "mean"}),
    ("hgca", {"neighbours": 1, "top_p": 0.8, "renew": 4, "tail": "mean"}),
    ("scout", {"true_query": True}),
    ("pqcache", {"tail": "mean"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_what_is_published_has_none_of_them(name: str, options: dict[str, Any]) -> None:
    row = METHODS.get(f"{name}-paper", METHODS[name])
    own = compose(row).params
    assert all(own[key] in (0, 1.0, "none", False) for key in options)


def maintenance(world: World) -> Entries:
    return cast("Entries", world.runtime.groups[0].maintenance)


def kept(world: World, slot: int, layer: int, head: int) -> list[int]:
    """Positions in DRAM that the last decode step attended to."""
    lists = maintenance(world).lists
    return lists.positions(layer, slot, head)[: int(lists.shown[layer, slot, head])].tolist()


def scores(world: World, slot: int, layer: int, at: range, keys: list[int], head: int) -> Tensor:
    """`[queries, keys]` float64 of a query head."""
    q, k, _ = world.kept[slot][layer]
    return q[at.start : at.stop, head].double() @ k[keys, head // GROUP].double().T * SCALE


def weigh(world: World, slot: int, layer: int, kv: int, at: range, entries: int) -> list[float]:
    """The largest weight that a query gives each of the first entries, over queries and query heads."""
    heads = range(kv * GROUP, (kv + 1) * GROUP)
    found = [scores(world, slot, layer, at, list(range(entries)), head).softmax(-1).amax(0) for head in heads]
    return torch.stack(found).amax(0).tolist()


@pytest.mark.parametrize(("neighbours", "top_p", "beta"), [(0, 0.6, 1.0), (3, 1.0, 1.5), (2, 0.7, 0.8)])
def test_neighbours_and_the_heaviest_come_before_the_threshold(neighbours: int, top_p: float, beta: float) -> None:
    draws = torch.Generator().manual_seed(0)
    weights = (3 * torch.randn(2, 50, generator=draws)).softmax(-1)
    found = MawThreshold(beta=beta, neighbours=neighbours, top_p=top_p).keep(weights, 50)
    for own, got in zip(weights.tolist(), found.tolist(), strict=True):
        pooled = [max(own[max(0, i - neighbours) : i + neighbours + 1]) for i in range(50)]
        left, want = top_p * sum(pooled), [False] * 50
        for i in sorted(range(50), key=lambda i: -pooled[i]):
            if left <= 0:
                break
            left -= pooled[i]
            want[i] = pooled[i] > beta / 50
        assert got == want
        assert any(want)
        assert not all(want)


def test_decode_steps_choose_again_by_their_queries() -> None:
    """Right after each choice the lists are those that the last 64 queries weigh; between, decode adds at the ends."""
    world = World(METHODS["hgca"], block=8, window_blocks=1, renew=5, beta=2.5)
    world.step(90, 40)
    changed = 0
    for i in range(17):
        before = [[kept(world, slot, 1, kv) for kv in range(KV_HEADS)] for slot in (0, 1)] if i else None
        world.step(1, 1)
        if i % 5:
            continue
        for slot in (0, 1):
            length = world.lengths[slot] - 1
            first = world.window(slot)
            at = range(max(0, length - QUERIES), length)
            for layer in range(LAYERS):
                for kv in range(KV_HEADS):
                    worth = weigh(world, slot, layer, kv, at, first)
                    assert kept(world, slot, layer, kv) == [p for p, x in enumerate(worth) if x > 2.5 / first]
            if before is not None:
                changed += before[slot] != [kept(world, slot, 1, kv) for kv in range(KV_HEADS)]
    assert changed > 2, "what decode asked for is not what the prompt did"


def test_without_renewal_decode_steps_change_nothing_that_was_chosen() -> None:
    world = World(METHODS["hgca"], block=8, window_blocks=2, beta=2.5)
    world.step(90, 40)
    world.step(1, 1)
    chosen = [kept(world, 0, 1, kv) for kv in range(KV_HEADS)]
    for _ in range(6):
        world.step(1, 1)
    assert [kept(world, 0, 1, kv)[: len(own)] for kv, own in enumerate(chosen)] == chosen


def with_rest(world: World, slot: int, layer: int, gaps: list[float], left: list[list[int]]) -> Tensor:
    """What the last query gets, `[q_heads, d]` float64: of everything but `left`, for which their mean stands in."""
    _, k, v = world.kept[slot][layer]
    length, outs = world.lengths[slot], []
    for head in range(HEADS):
        gone = left[head // GROUP]
        own = [p for p in range(length) if p not in set(gone)]
        values = v[:, head // GROUP].double()
        score = scores(world, slot, layer, range(length - 1, length), own, head)[0]
        parts = values[own]
        if gone:
            mean = k[gone, head // GROUP].double().mean(0)
            query = world.kept[slot][layer][0][-1, head].double()
            more = float(query @ mean) * SCALE + math.log(len(gone)) + gaps[head]
            score = torch.cat([score, torch.tensor([more], dtype=torch.float64)])
            parts = torch.cat([parts, values[gone].mean(0, keepdim=True)])
        outs.append(score.softmax(-1) @ parts)
    return torch.stack(outs)


def gap(world: World, slot: int, layer: int, head: int, at: range, gone: list[int]) -> float:
    if not gone:
        return 0.0
    real = scores(world, slot, layer, at, gone, head).logsumexp(-1)
    mean = world.kept[slot][layer][1][gone, head // GROUP].double().mean(0)
    middle = world.kept[slot][layer][0][at.start : at.stop, head].double() @ mean * SCALE
    return float((real - middle - math.log(len(gone))).mean())


def test_what_hgca_does_not_keep_counts_with_its_mean() -> None:
    """After the prompt, while blocks leave, and after tokens were taken back."""
    world = World(METHODS["hgca"], block=8, window_blocks=1, beta=2.5, tail="mean")
    world.step(90, 33)
    gaps: dict[tuple[int, int], list[float]] = {}
    seen: set[int] = set()

    def look(outs: list[Tensor]) -> None:
        for slot in (0, 1):
            first = world.window(slot)
            for layer in range(LAYERS):
                left = [[p for p in range(first) if p not in kept(world, slot, layer, kv)] for kv in range(KV_HEADS)]
                if (slot, layer) not in gaps:
                    end = world.lengths[slot] - 1
                    at = range(max(0, end - QUERIES), end)
                    gaps[slot, layer] = [gap(world, slot, layer, h, at, left[h // GROUP]) for h in range(HEADS)]
                want = with_rest(world, slot, layer, gaps[slot, layer], left)
                torch.testing.assert_close(outs[layer][slot].double(), want, atol=1e-5, rtol=1e-4)
                seen.add(len(left[0]))

    for _ in range(26):
        look(world.step(1, 1))
    assert len(seen) > 4, "blocks left meanwhile"
    for slot in (0, 1):
        length = world.lengths[slot]
        world.runtime.truncate(slot, length, length - 11)
        world.lengths[slot] -= 11
        world.kept[slot] = [[x[: length - 11] for x in layer] for layer in world.kept[slot]]
    for _ in range(20):
        look(world.step(1, 1))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_rest_is_what_no_list_has(seed: int) -> None:
    """Prompts, turns, decode steps that choose again and tokens taken back, at random."""
    r = random.Random(seed)
    world = World(METHODS["hgca"], block=8, window_blocks=1 + seed % 2, beta=2.0, tail="mean", renew=[0, 3, 7, 1][seed])
    left = cast("Averages", world.runtime.groups[0].index).rest
    assert left is not None
    some = 0
    for _ in range(20):
        what = r.random()
        if what < 0.25 and all(world.lengths):
            slot = r.randrange(2)
            length = world.lengths[slot]
            keep = r.choice([0, r.randint(0, length)])
            world.runtime.truncate(slot, length, keep)
            world.lengths[slot] = keep
            world.kept[slot] = [[x[:keep] for x in layer] for layer in world.kept[slot]]
            continue
        decoding = what < 0.8 and all(world.lengths)
        for new in [(1, 1)] * r.randint(1, 14) if decoding else [(r.randint(1, 50), r.randint(2, 20))]:
            world.step(*new)
            for slot in (0, 1) if new == (1, 1) else ():
                first = world.window(slot)
                for layer in range(LAYERS):
                    _, k, v = world.kept[slot][layer]
                    for kv in range(KV_HEADS):
                        chosen = set(kept(world, slot, layer, kv))
                        gone = [p for p in range(first) if p not in chosen]
                        own = left.known(layer, slot)
                        assert (0 if own is None else int(own.count[kv])) == len(gone)
                        if own is not None:
                            want = torch.stack([k[gone, kv].double().sum(0), v[gone, kv].double().sum(0)])
                            torch.testing.assert_close(own.sums[kv], want, atol=1e-4, rtol=1e-4)
                        some += len(gone)
    assert some


def test_a_mean_for_the_rest_is_nearer_to_full_attention() -> None:
    errors = {}
    for tail in ("mean", "none"):
        world = World(METHODS["hgca"], block=8, window_blocks=1, beta=4.0, tail=tail)
        world.step(120, 60)
        error = 0.0
        for _ in range(12):
            outs = world.step(1, 1)
            for layer in range(LAYERS):
                full = with_rest(world, 0, layer, [0.0] * HEADS, [[]] * KV_HEADS)
                error += float((outs[layer][0].double() - full).square().sum())
        errors[tail] = math.sqrt(error)
    assert errors["mean"] < 0.95 * errors["none"]


def test_what_pqcache_does_not_choose_counts_by_its_codes_with_the_mean_value() -> None:
    world = World(METHODS["pqcache"], **SMALL, tail="mean", block=8, window_blocks=1)
    world.step(90, 61)
    for _ in range(12):
        outs = world.step(1, 1)
        for slot in (0, 1):
            edge, full = world.window(slot), (world.lengths[slot] - 1) // 8 * 8
            for layer in range(LAYERS):
                q, k, v = world.kept[slot][layer]
                made = books(world, slot, layer)
                want = []
                for head in range(HEADS):
                    kv = head // GROUP
                    chosen = set(world.picked(slot, layer)[kv])
                    near = [p for p in range(world.lengths[slot]) if p in chosen or p >= edge]
                    gone = [p for p in range(edge) if p not in chosen]
                    coded = torch.stack([
                        torch.cat([
                            made[kv, i, (made[kv, i] - k[p, kv, i * PIECE : (i + 1) * PIECE].double()).square()
                                 .sum(-1).argmin()]
                            for i in range(2)
                        ])
                        for p in gone
                    ])  # fmt: skip
                    query = q[-1, head].double() * SCALE
                    score = torch.cat([k[near, kv].double() @ query, (coded @ query).logsumexp(-1)[None]])
                    values = torch.cat([v[near, kv].double(), v[:full, kv].double().mean(0, keepdim=True)])
                    want.append(score.softmax(-1) @ values)
                torch.testing.assert_close(outs[layer][slot].double(), torch.stack(want), atol=1e-5, rtol=1e-4)


def test_with_the_true_query_the_predicted_one_only_picks() -> None:
    """Whatever is predicted: over what it picked and what is resident, the layer's own query is exact."""
    params: dict[str, Any] = {"block": 8, "budget": 48, "recall_interval": 0, "ahead_from": 1}
    world = World(METHODS["scout"], true_query=True, **params)
    other = World(METHODS["scout"], **params)
    for each in (world, other):
        each.step(90, 61)
    differs = False
    for _ in range(10):
        outs, predicted = (each.step(1, 1, guess=lambda q: q.roll(1, -1)) for each in (world, other))
        for slot in (0, 1):
            for layer in range(LAYERS):
                q, k, v = world.kept[slot][layer]
                want = []
                for kv, own in enumerate(attended_blocks(world, slot, layer)):
                    mine = q[-1, kv * GROUP : (kv + 1) * GROUP].double() @ k[own, kv].double().T * SCALE
                    want.append(mine.softmax(-1) @ v[own, kv].double())
                torch.testing.assert_close(outs[layer][slot].double(), torch.cat(want), atol=1e-5, rtol=1e-4)
                differs |= not torch.allclose(outs[layer][slot], predicted[layer][slot], atol=1e-3)
    assert differs


def attended_blocks(world: World, slot: int, layer: int) -> list[list[int]]:
    """By KV head: positions of the picked blocks in DRAM, the residents and the window. By their keys, which differ."""
    cache, selection = world.runtime.groups[0].cache, world.probe.by_layer[layer]
    keys = world.kept[slot][layer][1]
    found = []
    for kv in range(KV_HEADS):
        own: list[int] = []
        assert cache.host is not None
        for listed, memory in ((selection.gpu, cache.gpu.memory[layer]), (selection.host, cache.host.memory[layer])):
            assert listed is not None
            tokens, table = int(listed.tokens[slot, kv]), listed.table[slot, kv]
            rows = memory[table[: -(-tokens // cache.block)].long(), kv, 0].flatten(0, 1)[:tokens]
            same = (rows[:, None] == keys[None, :, kv]).all(-1)
            assert same.sum(-1).tolist() == [1] * tokens
            own += same.nonzero()[:, 1].tolist()
        found.append(sorted(own))
        assert len(set(own)) == len(own), "nothing is attended twice"
    return found


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_captured_step_is_the_same_step(name: str, options: dict[str, Any]) -> None:
    small: dict[str, dict[str, Any]] = {
        "hgca": {"block": 8, "window_blocks": 2, "beta": 1.5},
        "scout": {"block": 8, "budget": 48, "ahead_from": 1},
        "pqcache": {**SMALL, "block": 8},
    }
    plain, captured = (World(METHODS[name], seqs=3, fixed=True, **small[name], **options) for _ in range(2))
    for world in (plain, captured):
        world.step(90, 61)
    for _ in range(20):
        for a, b in zip(plain.step(1, 1), captured.step(1, 1, rows=3), strict=True):
            torch.testing.assert_close(a, b)


def test_an_engine_whose_decode_steps_choose_again_says_what_it_says_alone() -> None:
    """Sequences are chosen for off the steps while others go on; what is chosen is their own business."""
    params: dict[str, Any] = {"beta": 2.0, "window_blocks": 1, "renew": 6, "tail": "mean", "neighbours": 1}
    prompts = [prompt(n, seed=4) for n in (60, 90, 41, 75)]
    alone = []
    for ids in prompts:
        with llm("hgca", max_batch=1, **params) as engine:
            alone.append(engine.generate([ids], greedy(40, ignore_eos=True))[0].token_ids)
    with llm("hgca", max_batch=3, **params) as engine:
        handles = [engine.submit(ids, greedy(40, ignore_eos=True)) for ids in prompts]
        assert [handle.result().token_ids for handle in handles] == alone
    with llm("hgca", max_batch=1, **{**params, "renew": 0}) as engine:
        assert engine.generate([prompts[1]], greedy(40, ignore_eos=True))[0].token_ids != alone[1]


@pytest.mark.parametrize("params", [{"neighbours": -1}, {"top_p": 0}, {"renew": 1.5}, {"tail": "zero"}])
def test_what_makes_no_sense_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        compose(METHODS["hgca"], **params)
