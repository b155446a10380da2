"""PQCache: codes of a prompt's own keys say which tokens are fetched; its rule beside a slow re-statement."""

import math

import pytest
import torch
from tests.hf.families import tiny
from tests.methods.fetched import DIM, GROUP, KV_HEADS, LAYERS, SCALE, World
from torch import Tensor

import coattn
from coattn.errors import ConfigError
from coattn.kernels.quantise.kmeans import cluster, nearest
from coattn.method.table import METHODS
from coattn.types import Step
from coattn_lab.bench.kv import fill_randomly

ROW = METHODS["pqcache"]
SMALL = {"sinks": 4, "compress": 0.3, "subbits": 4, "cache_tokens": 0}
CACHED = {**SMALL, "cache_tokens": 48, "cache_block": 16}
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


class SlowCache:
    """By block of a sequence: how often, and when last, it was among the most chosen."""

    def __init__(self, places: int, size: int) -> None:
        self.places, self.size, self.held, self.clock = places, size, dict[int, tuple[int, int]](), 0

    def step(self, chosen: list[set[int]], there: int) -> None:
        self.clock += 1
        counts: dict[int, int] = {}
        for own in chosen:
            for p in own:
                if (p // self.size + 1) * self.size <= there:
                    counts[p // self.size] = counts.get(p // self.size, 0) + 1
        most = sorted(counts, key=lambda b: (-counts[b], b))[: self.places]
        used = [b for b in most if b in self.held]
        for b in used:
            self.held[b] = self.held[b][0] + 1, self.clock
        for b in (b for b in most if b not in used):
            if len(self.held) == self.places:
                fresh = {*used, *(b for b, own in self.held.items() if own == (1, self.clock))}
                del self.held[min((b for b in self.held if b not in fresh), key=lambda b: self.held[b])]
            self.held[b] = 1, self.clock


def cached(world: World, slot: int, layer: int) -> list[int]:
    """By KV head, how many tokens the last step found in the cache."""
    work = next(w for w in world.probe.by_layer[layer].works if w.kind == "cached")
    return work.blocks.tokens[slot].tolist()


@pytest.mark.parametrize("block", [4, 8])
def test_hits_are_those_of_a_cache_that_drops_what_is_used_least(block: int) -> None:
    """Beside a slow re-statement, and beside the same steps without a cache: every number is the same."""
    plain, world = (World(ROW, **own, block=block, window_blocks=1) for own in (SMALL, CACHED))
    slows = {(slot, layer): SlowCache(3, 16) for slot in (0, 1) for layer in range(LAYERS)}
    for each in (plain, world):
        torch.manual_seed(0)
        each.step(130, 95)
    hits, misses, dropped = 0, 0, 0
    for _ in range(25):
        # codebooks are drawn at random, in the first of these steps
        expected, outs = [], []
        for each, found in ((plain, expected), (world, outs)):
            torch.manual_seed(1)
            found += each.step(1, 1)
        for one, other in zip(expected, outs, strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)
        for (slot, layer), slow_cache in slows.items():
            listed, far = plain.picked(slot, layer), world.picked(slot, layer)
            near = [sum(p // 16 in slow_cache.held for p in own) for own in listed]
            assert cached(world, slot, layer) == near
            assert [len(own) for own in far] == [len(own) - n for own, n in zip(listed, near, strict=True)]
            assert all(p // 16 not in slow_cache.held for own in far for p in own)
            prompt = (130, 95)[slot]
            begin = world.lengths[slot] - 1 - int((prompt - 4) * 0.3 * 0.5)
            before = set(slow_cache.held)
            slow_cache.step([{p for p in own if 4 <= p < begin} for own in listed], world.window(slot))
            dropped += len(before - set(slow_cache.held))
            hits, misses = hits + sum(near), misses + sum(map(len, far))
    assert hits > 500
    assert misses > 500
    assert dropped > 5, "the cache is too small for all"


def test_bytes_over_pcie_are_those_that_the_cache_lacks() -> None:
    world = World(ROW, **CACHED, block=8)
    world.step(130, 95)
    for _ in range(5):
        world.step(1, 1)
    step = Step.of((0, 1), tuple(n - 1 for n in world.lengths), (1, 1))
    report = world.runtime.report(step)
    far = [world.picked(slot, layer) for slot in (0, 1) for layer in range(LAYERS)]
    near = [cached(world, slot, layer) for slot in (0, 1) for layer in range(LAYERS)]
    assert report["attended_host"] == pytest.approx(sum(len(x) for own in far for x in own) / KV_HEADS / LAYERS)
    assert report["cached_entries"] == pytest.approx(sum(map(sum, near)) / KV_HEADS / LAYERS)
    assert report["cached_entries"] > 1


def test_a_sequence_that_loses_tokens_or_reads_more_begins_with_an_empty_cache() -> None:
    world = World(ROW, **CACHED, block=8)
    world.step(130, 95)
    for _ in range(3):
        world.step(1, 1)
    hot = world.runtime.groups[0].index.hot[1]
    assert (hot.held[:2] >= 0).any(1).all()
    world.take_back(0, 2)
    assert (hot.held[0] == -1).all()
    assert (hot.held[1] >= 0).any()
    world.step(0, 20)
    world.step(1, 1)  # a turn has been read: codebooks are new, and nothing is cached before its first step
    assert cached(world, 1, 1) == [0] * KV_HEADS


def test_the_cache_takes_what_it_declares_and_no_more_than_a_sequence() -> None:
    held = []
    for own in (SMALL, CACHED):
        world = World(ROW, **own, block=8, window_blocks=2)
        world.step(90, 41)
        held.append(world.ledger.held["gpu"])
        world.runtime.release()
        assert world.ledger.held["gpu"] == 0
    assert held[1] - held[0] == 2 * LAYERS * 48 * KV_HEADS * 2 * DIM * 4
    short = World(ROW, **{**CACHED, "cache_tokens": 4096}, fixed=True, block=8, window_blocks=2)
    assert short.runtime.groups[0].index.hot[0].held.shape == (3, 160 // 16)
    with pytest.raises(ConfigError, match="cache_block is 16, which is no multiple of block"):
        World(ROW, **CACHED, block=32)
