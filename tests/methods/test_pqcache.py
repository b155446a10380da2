"""PQCache: codes of a prompt's own keys say which tokens are fetched; its rule beside a slow re-statement."""

import math

import pytest
import torch
from tests.hf.families import tiny
from tests.methods.fetched import DIM, GROUP, KV_HEADS, LAYERS, SCALE, World
from torch import Tensor

import coattn
from coattn.kernels.quantise.kmeans import cluster, nearest
from coattn.method.table import METHODS
from coattn.types import Step
from coattn_lab.bench.kv import fill_randomly

ROW = METHODS["pqcache"]
SMALL = {"sinks": 4, "compress": 0.3, "subbits": 4}
PIECE = DIM // 2


def books(world: World, slot: int, layer: int) -> Tensor:
    """`[kv_heads, 2, centroids, d / 2]`"""
    return world.runtime.groups[0].index.books[layer][slot].double()


def slow(world: World, slot: int, layer: int, prompt: int) -> list[set[int]]:
    """By KV head: the positions in DRAM that are attended. Number by number."""
    q, k, _ = world.kept[slot][layer]
    made, past, edge = books(world, slot, layer), world.lengths[slot] - 1, world.window(slot)
    recent, top = (int((prompt - 4) * 0.3 * 0.5) for _ in range(2))
    begin = past - recent
    candidates = list(range(4, min(begin, edge)))
    found = []
    for kv in range(KV_HEADS):
        keys = {}
        for p in candidates:
            pieces = []
            for i in range(2):
                own = k[p, kv, i * PIECE : (i + 1) * PIECE].double()
                pieces.append(made[kv, i, (made[kv, i] - own).square().sum(-1).argmin()])
            keys[p] = torch.cat(pieces)
        total = dict.fromkeys(candidates, 0.0)
        for head in range(GROUP * kv, GROUP * (kv + 1)):
            scores = {p: math.exp(float(q[-1, head].double() @ keys[p]) * SCALE) for p in candidates}
            for p in candidates:
                total[p] += scores[p] / sum(scores.values())
        best = sorted(candidates, key=lambda p: -total[p])[:top]
        found.append({*range(min(4, edge)), *best, *range(max(begin, 4), edge)})
    return found


@pytest.mark.parametrize(("block", "window"), [(1, 1), (8, 1), (8, 3)])
def test_takes_what_the_slow_rule_takes(block: int, window: int) -> None:
    world, prompts = World(ROW, **SMALL, block=block, window_blocks=window), (90, 61)
    world.step(50, 61)  # a prompt in two chunks, and one in one
    world.step(40, 0)
    total = 0
    for i in range(20):
        outs = world.step(1, 1)
        for layer in range(LAYERS if i % 9 == 0 else 1):
            for slot in (0, 1):
                want = slow(world, slot, layer, prompts[slot])
                assert world.picked(slot, layer) == [sorted(own) for own in want]
                torch.testing.assert_close(
                    outs[layer][slot].double(), world.attended(slot, layer), atol=1e-5, rtol=1e-4
                )
                total += len(want[0])
    assert total > 300


def test_codebooks_are_k_means_of_the_prompt_without_its_sinks() -> None:
    world = World(ROW, **SMALL, block=8)
    world.step(90, 61)
    world.step(1, 1)
    for slot, prompt in ((0, 90), (1, 61)):
        keys = world.kept[slot][1][1][4:prompt].double()
        for kv in range(KV_HEADS):
            for i in range(2):
                points, own = keys[:, kv, i * PIECE : (i + 1) * PIECE], books(world, slot, 1)[kv, i]
                owner = (points[:, None] - own).square().sum(-1).argmin(1)
                lost = (points - own[owner]).square().sum()
                drawn = points[torch.randperm(len(points))[:16]]
                assert lost < (points[:, None] - drawn).square().sum(-1).amin(1).sum(), "better than points at random"
                for c in owner.unique():
                    mean = points[owner == c].mean(0)
                    assert (points[owner == c] - own[c]).square().sum() < 1.2 * (
                        points[owner == c] - mean
                    ).square().sum() + 0.5


def test_clusters_of_many_sets_at_once() -> None:
    centres = torch.randn(5, 4, 6) * 10
    points = (centres[:, torch.arange(400) % 4] + torch.randn(5, 400, 6) * 0.01)[:, torch.randperm(400)]
    found = cluster(points, 8)
    lost = (points - found.gather(1, nearest(points, found)[..., None].expand(-1, -1, 6))).square().sum(-1)
    assert lost.mean() < 30, "most centres are found"
    few = cluster(points[:, :3], 8)
    assert torch.equal(few.unique(dim=1).shape[1] * torch.ones(1), torch.tensor([3.0]))


def test_a_turn_makes_codebooks_and_sizes_anew_and_a_decoded_token_does_not() -> None:
    world = World(ROW, **SMALL, block=8)
    world.step(60, 60)
    world.step(1, 1)
    before = books(world, 0, 0).clone()
    for _ in range(9):
        world.step(1, 1)
    assert torch.equal(before, books(world, 0, 0))
    world.step(30, 0)
    world.step(1, 1)
    assert not torch.equal(before, books(world, 0, 0))
    assert world.runtime.groups[0].index.prompt.tolist() == [100, 60, 0]  # type: ignore[attr-defined]
    assert world.picked(0, 2) == [sorted(own) for own in slow(world, 0, 2, 100)]


def test_a_prompt_of_fewer_tokens_than_centroids_is_attended_as_a_whole() -> None:
    world = World(ROW, **{**SMALL, "subbits": 6, "compress": 1.0}, block=8)
    world.step(60, 30)
    world.step(1, 1)
    assert world.picked(0, 1) == [list(range(world.window(0)))] * KV_HEADS


def test_bytes_on_the_gpu_are_those_of_window_codebooks_and_codes() -> None:
    world = World(ROW, **SMALL, block=8, window_blocks=2)
    world.step(90, 41)
    group = world.runtime.groups[0]
    window = 2 * 2 * 8 * KV_HEADS * 2 * DIM * 4
    made = 3 * KV_HEADS * 16 * DIM * 4
    codes = (group.cache.host.memory.capacity + 1) * 8 * KV_HEADS * 2  # type: ignore[union-attr]
    staging = group.executor.staging.unit * group.executor.staging.blocks  # type: ignore[attr-defined]
    assert world.ledger.held["gpu"] == LAYERS * (window + made + codes) + staging
    assert sum(x.nbytes for x in group.index.books.values()) == LAYERS * made  # type: ignore[attr-defined]
    world.runtime.release()
    assert world.ledger.held["gpu"] == 0


def test_report_says_what_was_attended() -> None:
    world = World(ROW, **SMALL, block=8)
    world.step(90, 61)
    world.step(1, 1)
    step = Step.of((0, 1), tuple(n - 1 for n in world.lengths), (1, 1))
    want = sum(len(world.picked(slot, layer)[0]) for slot in (0, 1) for layer in range(LAYERS)) / LAYERS
    assert world.runtime.report(step)["attended_host"] == pytest.approx(want)


def test_whole_budget_gives_the_models_own_tokens() -> None:
    model = tiny("llama")
    ids = torch.randint(0, model.config.vocab_size, (1, 70))
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=6, do_sample=False)
        with coattn.attach(model, "pqcache", block=8, sinks=1000):
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), plain)


@pytest.mark.parametrize("method", ["pqcache", "infinigen"])
def test_random_keys_of_a_benchmark_are_chosen_from(method: str) -> None:
    world = World(METHODS[method], fixed=True, block=8, **({"budget": 9} if method == "infinigen" else SMALL))
    running = world.runtime.begin(Step.of((0, 1), (0, 0), (120, 90)))
    world.runtime.commit(running)
    world.lengths = [120, 90]
    fill_randomly(world.runtime)
    world.step(1, 1)
    picked = world.picked(0, 2)[0]
    assert 4 < len(picked) < 80
    assert picked != list(range(len(picked)))
