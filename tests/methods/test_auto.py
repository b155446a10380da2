"""auto: every entry whose estimated weight reaches the floor is attended exactly, a value stands in for the others."""

import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.auto.index import Sketch
from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.kernels.append import whole_blocks
from coattn.kernels.pool_memory import COLD, PoolTensors
from coattn.kernels.quantise.blocks import pack_blocks, unpack_blocks
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.sketch import SPREADS, Spread, fit, spread_of, unpack
from coattn.kernels.rest import Rest, rest_value, sum_rest
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

HEADS, KV_HEADS, DIM, SCALE, BLOCK, WINDOW = 6, 2, 16, 0.4, 8, 2
GROUP = HEADS // KV_HEADS


class World:
    """Two layers; every key and value they were given is known."""

    def __init__(self, seqs: int = 2, tokens: int | None = 256, shape: LayerShape | None = None, **params: Any) -> None:
        shape = shape or LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        own = {"block": BLOCK, "window_blocks": WINDOW, "pool_share": 0.125}
        composed = compose(METHODS["auto"], **{**own, **params})
        self.runtime = Runtime([shape] * 2, composed, Ledger(), seqs, tokens)
        self.draws = torch.Generator().manual_seed(3)
        self.kv = [[[torch.empty(0, KV_HEADS, DIM)] * 2 for _ in range(2)] for _ in range(seqs)]
        self.lengths = [0] * seqs
        self.q: list[Tensor] = []
        self.looked_up = 0
        """Wanted entries that lay cold in pools, of all calls of `slow`."""
        self.odd: tuple[int, ...] = ()
        """Tokens whose keys are far from all others."""
        self.rounded = params.get("host_dtype") == "int8"
        """Whether what lies in DRAM alone has been rounded."""
        self.pools: list[PoolTensors] = []
        """By layer: the pools when the last step began."""

    def step(self, *new: int) -> list[Tensor]:
        step = Step.of(tuple(range(len(new))), tuple(self.lengths), new)
        running = self.runtime.begin(step)
        self.pools = [deepcopy(pool) for pool in self.sketch.pools.values()]
        found, self.q = [], []
        for layer in range(2):
            q, k, v = (torch.randn(step.tokens, n, DIM, generator=self.draws) for n in (HEADS, KV_HEADS, KV_HEADS))
            for slot, (start, end) in enumerate(step.spans):
                for token in self.odd:
                    if self.lengths[slot] <= token < step.lengths[slot]:
                        k[start + token - self.lengths[slot]] *= 6
                own = self.kv[slot][layer]
                self.kv[slot][layer] = [torch.cat([own[0], k[start:end]]), torch.cat([own[1], v[start:end]])]
            found.append(self.runtime.attend(running, layer, q, k, v, SCALE))
            self.q.append(q)
        self.runtime.commit(running)
        self.lengths = list(step.lengths)
        return found

    @property
    def sinks(self) -> int:
        """First tokens, which stay in GPU memory: places in a pool count from the token after them."""
        return self.runtime.groups[0].cache.gpu.sinks * BLOCK

    @property
    def sketch(self) -> Sketch:
        index = self.runtime.groups[0].index
        assert isinstance(index, Sketch)
        return index

    def stored(self, slot: int, layer: int) -> list[Tensor]:
        """Keys and values as DRAM has them, and the newest as they were given."""
        k, v = self.kv[slot][layer]
        if self.rounded:
            full = len(k) // BLOCK * BLOCK
            packed = pack_blocks(whole_blocks(k[:full], v[:full], BLOCK))
            made = unpack_blocks(packed, BLOCK, DIM, torch.float32).transpose(2, 3)  # [n, kv_heads, block, 2, d]
            both = made.permute(3, 0, 2, 1, 4).reshape(2, full, KV_HEADS, DIM)
            k, v = (torch.cat([both[i], x[full:]]) for i, x in enumerate((k, v)))
        return [k, v]

    def coded(self, slot: int) -> bool:
        """Whether the last layer's sketches of a sequence's full blocks are what its tables make of them."""
        ids = self.runtime.groups[0].cache.dram.table.owned[slot]
        words = self.sketch.memory[1][torch.tensor(ids)].transpose(1, 2).flatten(0, 1)
        return words.equal(self.sketch.tables[1].encode(self.kv[slot][1][0])[: len(words)])

    def check_books(self) -> None:
        """Every place of a pool holds the token that its books name, and some came while decoding."""
        for layer, pool in self.sketch.pools.items():
            young = size = 0
            for slot in range(len(self.lengths)):
                for head in range(KV_HEADS):
                    tokens = pool.token_of[slot, head].long()
                    assert (pool.place_of[slot, head, tokens] % COLD).tolist() == list(range(len(tokens)))
                    assert int((pool.place_of[slot, head] >= 0).sum()) == len(tokens)
                    rows, off = self.rows(pool, slot, head), 0.0 if pool.packed is None else 0.02
                    for i, kept in enumerate(self.stored(slot, layer)):
                        torch.testing.assert_close(rows[i], kept[tokens + self.sinks, head], atol=off, rtol=1e-5)
                    young += int((pool.age[slot, head] > 0).sum())
                    size += len(tokens)
            assert 0 < young <= size

    def rows(self, pool: PoolTensors, slot: int, head: int) -> list[Tensor]:
        """Keys and values of all places of a pool."""
        places = pool.age.shape[-1]
        if pool.packed is not None:
            return list(pool.packed.rows(slot, head, torch.arange(places)))
        start = pool.first + slot * places // BLOCK
        return list(pool.gpu[start : start + places // BLOCK, head].transpose(0, 1).flatten(1, 2))

    def slow(self, slot: int, layer: int, floor: float) -> tuple[Tensor, int]:
        """What the last decode step should have given, and entries of DRAM attended over KV heads."""
        cache, index = self.runtime.groups[0].cache, self.sketch
        edge = cache.gpu.first(self.lengths[slot]) * BLOCK
        given = self.kv[slot][layer]
        # the first block and the newest ones are attended as they were given
        whole_k, whole_v = (
            torch.cat([x[: self.sinks], y[self.sinks : edge], x[edge:]])
            for x, y in zip(given, self.stored(slot, layer), strict=True)
        )
        ids = cache.host.table.owned[slot][: edge // BLOCK]
        table, outs, attended = index.tables[layer], [], 0
        planes = unpack(index.memory[layer][torch.tensor(ids)]).transpose(1, 2).flatten(0, 1)  # [n, kv_heads, planes]
        full = self.lengths[slot] // BLOCK * BLOCK
        for head in range(KV_HEADS):
            coded = planes[:, head] @ table.worth[head] + table.base[head]
            k, v = whole_k.clone(), whole_v.clone()
            pool = self.pools[layer]
            if pool.packed is not None:
                at = pool.token_of[slot, head].long()
                for x, rows in zip((k, v), self.rows(pool, slot, head), strict=True):
                    x[at + self.sinks, head] = rows
            q = self.q[layer][slot, head * GROUP : (head + 1) * GROUP]
            held, cold = torch.zeros(2, edge, dtype=torch.bool)
            found = pool.place_of[slot, head, : edge - self.sinks]
            held[self.sinks :], cold[self.sinks :] = (found >= 0) & (found < COLD), found >= COLD
            held[: self.sinks] = True
            own = q @ k[:, head].T
            scores = torch.cat([torch.where(held, own[:, :edge], q @ coded.T), own[:, edge:]], 1) * SCALE
            total = scores.logsumexp(-1)
            if pool.packed is not None:
                # what the pool weighs is estimated, and as much more or less as the last estimate was off
                inside, heads = held.clone(), slice(head * GROUP, (head + 1) * GROUP)
                inside[: self.sinks] = False
                told = (q @ coded.T * SCALE)[:, inside].logsumexp(-1)
                off = pool.true_lse[slot, :, heads].logsumexp(0) - pool.est_lse[slot, heads]
                others = scores.masked_fill(torch.cat([inside, torch.zeros(len(k) - edge).bool()]), -torch.inf)
                total = others.logsumexp(-1).logaddexp(told + torch.where(off.isfinite(), off, 0.0))
            weights = (scores[:, :edge] - total[:, None]).exp()
            wanted = (weights >= floor).any(0) & ~held
            attended += int((wanted & ~cold).sum())
            self.looked_up += int((wanted & cold).sum())
            wanted |= held
            exact = (q @ k[:, head].T * SCALE).masked_fill(
                torch.cat([~wanted, torch.zeros(len(k) - edge).bool()]), -1e9
            )
            left = scores[:, :edge].masked_fill(wanted, -torch.inf).logsumexp(-1, keepdim=True)
            both = torch.cat([exact, left], 1).softmax(-1)
            # the newest block that is full counts from the next step on
            seen = full - BLOCK if self.lengths[slot] % BLOCK == 0 else full
            # a prompt's keys and values are counted as DRAM has them, but for the first block
            first = index.filled[slot][1] * BLOCK
            parts = zip(self.stored(slot, layer), given, strict=True)
            sums = sum_rest(*(torch.cat([x[self.sinks : first], y[first:seen]]) for x, y in parts), table)[None]
            every, others = self.q[layer][slot, None], torch.empty(1, HEADS, DIM)
            bound = torch.zeros(1, HEADS)
            bound[0, head * GROUP : (head + 1) * GROUP] = total + math.log(floor)
            rest_value(every, Rest(sums, table), bound, torch.zeros(1), torch.zeros(1).int(), SCALE, None, others)
            out = both[:, :-1] @ v[:, head] + both[:, -1:] * others[0, head * GROUP : (head + 1) * GROUP]
            outs.append(out)
        return torch.cat(outs), attended


@pytest.mark.parametrize(
    ("quality", "more"),
    [
        (0.9, {}),
        (0.97, {}),
        (0.9, {"host_dtype": "int8"}),
        (0.9, {"pool_dtype": "int8"}),
        (0.9, {"pool_dtype": "int8", "hot": 10, "pool_share": 0.25}),
        (0.97, {"pool_dtype": "int8", "host_dtype": "int8"}),
        (0.97, {"host_dtype": "int8"}),
    ],
)
def test_equals_the_rule_written_out(quality: float, more: dict[str, Any]) -> None:
    hot = more.get("hot", 4096)
    world = World(quality=quality, code_bytes=4, now=1.0, **more)
    world.step(150, 90)
    places = BLOCK * world.sketch.cache.spec.plan.pool_blocks
    assert places == 256 * more.get("pool_share", 0.125)
    for _ in range(12):  # a block becomes full on the way, in both
        got = world.step(1, 1)
    floor = ((1 - quality) / 2) ** 2
    taken = []
    for slot in range(2):
        for layer in range(2):
            want, attended = world.slow(slot, layer, floor)
            torch.testing.assert_close(got[layer][slot], want, atol=1e-5, rtol=1e-4)
            taken.append(attended)
    report = world.runtime.report(Step.of((0, 1), (161, 101), (1, 1)))
    assert report["row_entries"] == pytest.approx(sum(taken) / 2 / KV_HEADS)
    assert 0 < report["row_entries"] < 240
    assert report.get("cold_entries", 0) == pytest.approx(world.looked_up / 2 / KV_HEADS)
    assert (world.looked_up > 0) is (hot < places)
    # window, first block, pool, and codes by their bytes
    gpu, far = world.runtime.groups[0].cache.gpu, report["row_entries"] / report["kept_mean"]
    share = (2 * DIM + 6) / (8 * DIM) if "pool_dtype" in more else 1
    near = sum(gpu.entries(slot, length) + min(places, hot) * share for slot, length in ((0, 162), (1, 102)))
    assert report["attended_gpu"] == pytest.approx(near + far * report["code_share"])
    world.check_books()


def test_what_is_wanted_for_later_comes_into_the_pool() -> None:
    came = []
    for far in (1.0, 2.0, 4.0):
        world, later = World(quality=0.8, code_bytes=4, pool_share=0.3, now=4.0, far=far, audit=False), 0.0
        world.step(150, 90)
        for _ in range(12):
            world.step(1, 1)
            said = world.runtime.report(Step.of((0, 1), tuple(n - 1 for n in world.lengths), (1, 1)))
            assert far > 1 or said["later_entries"] > said["row_entries"]
            later += said.get("later_entries", 0.0)
        world.check_books()
        came.append(later)
    assert came[0] > 1.5 * came[1] > 0
    assert came[2] == 0


def test_more_quality_reads_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tokens, in the first decode step: each quality wants what the one below it does, and more."""
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.2)  # weights that differ a thousandfold
    read, errors = [], []
    for quality in (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999):
        world = World(quality=quality, code_bytes=4, audit=False)
        world.step(150, 90)
        exact = World(quality=1.0, code_bytes=4)
        exact.step(150, 90)
        pairs = zip(world.step(1, 1), exact.step(1, 1), strict=True)
        errors.append(sum(float((a - b).square().sum()) for a, b in pairs))
        read.append(world.runtime.report(Step.of((0, 1), (150, 90), (1, 1)))["row_entries"])
    assert read == sorted(read)
    assert len(set(read)) == len(read)
    assert errors == sorted(errors, reverse=True)


def test_in_8_bits_scales_count_in_the_gpu_tier_and_single_rows_are_rounded() -> None:
    held = {}
    for form in ("model", "int8"):
        world = World(seqs=1, quality=0.9, code_bytes=4, host_dtype=form, tokens=None)
        world.step(150)
        world.step(1)
        held[form] = dict(world.runtime.groups[0].cache.spec.ledger.held)
        memory = world.runtime.groups[0].cache.host
        blocks = memory.memory.capacity
    # a scale and a minimum in 16 bits for each channel and each row, of two layers
    assert held["int8"]["gpu"] - held["model"]["gpu"] == blocks * 2 * KV_HEADS * 4 * (DIM + BLOCK)
    assert held["int8"]["host"] < held["model"]["host"] / 2
    assert not compose(METHODS["auto"], host_dtype="int8", quality=1.0).exact
    with pytest.raises(ConfigError, match="host_dtype is 'int8', but executor 'pull'"):
        compose(METHODS["offload"], host_dtype="int8")


def test_scales_follow_blocks_that_come_from_a_file() -> None:
    world = World(seqs=1, quality=0.9, code_bytes=4, host_dtype="int8")
    world.step(150)
    world.step(1)
    tier = world.runtime.groups[0].cache.host
    host, ids = tier.memory, list(range(18))
    files = host.contents(ids)
    kept = [host[1][:18].clone(), host.scales[1][:18].clone()]
    host[1].zero_()
    host.scales[1].zero_()
    host.replace(ids, files)
    assert host[1][:18].equal(kept[0])
    assert host.scales[1][:18].equal(kept[1])
    world.step(1)
    world.check_books()


@pytest.mark.parametrize("pool_dtype", [None, "int8"])
def test_quality_one_is_exact(pool_dtype: str | None) -> None:
    world = World(seqs=1, quality=1.0, pool_dtype=pool_dtype)
    world.step(100)
    got = world.step(1)
    for layer in range(2):
        q, (k, v) = world.q[layer][0].view(KV_HEADS, GROUP, DIM), world.kv[0][layer]
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * SCALE).softmax(-1)
        want = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        torch.testing.assert_close(got[layer][0], want, atol=1e-5, rtol=1e-5)


def begin_again(world: World, tokens: int) -> None:
    """Another sequence comes into the slot of the first."""
    world.runtime.truncate(0, world.lengths[0], 0)
    world.lengths, world.kv[0] = [0], [[torch.empty(0, KV_HEADS, DIM)] * 2 for _ in range(2)]
    world.step(tokens)


def spread_file(folder: Path) -> tuple[LayerShape, Path, dict[int, Spread]]:
    """What an engine measures of a model with these layers."""
    shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"), mark=2.0)
    keys, path = torch.randn(2, 300, KV_HEADS, DIM), folder / "spread"
    spreads = {i: Spread(*(x.float() for x in spread_of(keys[i], None))) for i in range(2)}
    SPREADS.save(path, spreads, TextOrigin("small", "t", "0", 300, (2.0, 2.0)))
    return shape, path, spreads


def test_tables_are_made_once_and_again_from_a_sequence_twice_as_long() -> None:
    world = World(seqs=1)
    world.step(10)
    world.step(1)
    sketch = world.sketch
    assert sketch.filled == {}  # nothing lies in DRAM alone
    while not sketch.filled:
        world.step(1)
    (_, blocks), seen = sketch.filled[0], sketch.seen_tokens
    assert (sketch.made, seen) == (1, blocks * BLOCK)
    of = sketch.tables[0].of.clone()
    begin_again(world, seen + BLOCK)
    assert sketch.filled == {}
    world.step(1)
    assert sketch.filled == {0: (1, blocks + 1)}
    assert sketch.tables[0].of.equal(of)
    small = sketch.cache.gpu.pooled[0]
    while sketch.made == 1:
        world.step(1)
    assert sketch.seen_tokens == 2 * (seen + BLOCK)
    assert sketch.cache.gpu.pooled[0] > small
    assert int((sketch.pools[0].place_of[0, 0] >= 0).sum()) == sketch.cache.gpu.pooled[0] * BLOCK
    assert not sketch.tables[0].of.equal(of)
    assert sketch.filled == {0: (2, 2 * blocks + 2)}


def test_sequences_that_were_coded_by_other_tables_are_coded_anew() -> None:
    world = World(seqs=2)
    world.step(40, 150)
    running = world.runtime.begin(Step.of((0,), (40,), (1,)))
    assert world.sketch.filled == {0: (1, 5)}
    world.runtime.abort(running)
    of = world.sketch.tables[0].of.clone()
    world.step(1, 1)
    assert not world.sketch.tables[0].of.equal(of)
    assert world.sketch.filled == {0: (2, 5), 1: (2, 18)}
    assert all(map(world.coded, (0, 1)))


def test_tables_that_could_not_be_made_are_made_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seqs=1)
    world.step(150)
    step = Step.of((0,), (150,), (1,))
    with monkeypatch.context() as patch:
        patch.setattr("coattn.auto.index.fit", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            world.runtime.begin(step)
    assert world.sketch.filled == {}
    world.step(1)
    assert world.sketch.filled == {0: (2, 18)}
    assert world.sketch.tables[0].of.any()
    world.check_books()


def test_the_tables_of_a_file_stay(tmp_path: Path) -> None:
    shape, path, spreads = spread_file(tmp_path)
    world = World(seqs=1, sketch=str(path), shape=shape)
    of = world.sketch.tables[1].of.clone()
    torch.testing.assert_close(of, fit(spreads[1], world.sketch.planes(shape)).of)
    world.step(150)
    for _ in range(80):
        world.step(1)
    assert world.sketch.tables[1].of.equal(of)
    assert world.sketch.made == 1
    world.check_books()
    with pytest.raises(ConfigError, match=r"made for small .2 layers., not for the model in use"):
        World(sketch=str(path), shape=replace(shape, mark=3.0))


def test_blocks_are_coded_as_they_come_and_those_of_a_file_anew(tmp_path: Path) -> None:
    shape, path, _ = spread_file(tmp_path)
    world = World(seqs=1, sketch=str(path), shape=shape)
    world.step(100)
    assert world.sketch.filled == {0: (1, 12)}  # nothing is left for the first decode step
    world.step(50)
    host = world.runtime.groups[0].cache.dram
    assert world.coded(0)
    world.runtime.truncate(0, 150, 0)
    host.table.share(0, host.table.fresh(18))  # the same blocks, with sketches that others have written
    world.sketch.memory[1].zero_()
    world.runtime.abort(world.runtime.begin(Step.of((0,), (150,), (1,))))
    assert world.coded(0)
    host.table.swap(0, 3, *host.table.fresh(1))
    assert world.sketch.filled == {}


def test_a_pool_is_filled_by_the_same_queries_however_a_prompt_is_cut(tmp_path: Path) -> None:
    (shape, path, _), kept = spread_file(tmp_path), []
    for cuts in ((150,), (100, 30, 20), (140, 3, 7)):
        world = World(seqs=1, sketch=str(path), shape=shape)
        draws, start = torch.Generator().manual_seed(5), 0
        q, k, v = (torch.randn(150, n, DIM, generator=draws) for n in (HEADS, KV_HEADS, KV_HEADS))
        for new in cuts:
            running = world.runtime.begin(Step.of((0,), (start,), (new,)))
            for layer in range(2):
                world.runtime.attend(running, layer, *(x[start : start + new] for x in (q, k, v)), SCALE)
            world.runtime.commit(running)
            start += new
        world.runtime.abort(world.runtime.begin(Step.of((0,), (150,), (1,))))
        kept.append(world.sketch.pools[1].token_of[0].sort(-1).values)
    assert all(each.equal(kept[0]) for each in kept[1:])
    held = world.runtime.groups[0].maintenance._last
    world.runtime.release()
    assert not held  # GPU memory of prompts


def test_keys_that_are_like_no_other_stay_in_the_pool() -> None:
    world = World(seqs=1)
    world.odd = (23, 61, 62, 100)
    world.step(150)
    places = []
    for _ in range(70):
        world.step(1)
        places += [pool.place_of[0, :, torch.tensor(world.odd) - world.sinks] for pool in world.sketch.pools.values()]
    assert world.sketch.filled[0][1] < 150 // BLOCK + 70 // BLOCK
    pins = {pool.pins for pool in world.sketch.pools.values()}
    assert pins == {8}  # a quarter of the pool
    for found in places:
        assert ((found >= 0) & (found < 8)).all()
    world.check_books()


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("room", [3 << 20, 6 << 20, 20 << 20])
def test_pools_in_8_bits_keep_within_the_budget(seqs: int, room: int) -> None:
    """As a model in 16 bits has them; of one sequence too, whose padding slot has no rows."""
    shape = LayerShape(8, 2, 64, torch.bfloat16, torch.device("meta"))
    found = []
    for form in ("model", "int8"):
        composed, ledger = compose(METHODS["auto"], pool_dtype=form), Ledger(room * seqs)
        runtime = Runtime([shape] * 4, composed, ledger, seqs, 4096, fixed=True)
        assert ledger.held["gpu"] <= room * seqs
        found.append(runtime.groups[0].cache.spec.plan.pool_blocks * 32)
        runtime.release()
    assert found[0] <= found[1] <= 2048
    assert found[1] > 1.5 * found[0] or found[1] == 2048


@pytest.mark.parametrize(
    ("tokens", "seqs", "params", "pool"),
    [
        (1 << 20, 1, {"host_dtype": "int8"}, (1024, 8192)),  # sketches, scales and books are 97% of the room
        (1 << 16, 10, {"code_bytes": 64}, (4096, 8192)),  # sketches of twice the usual size
        (1 << 16, 10, {}, (8192, 16384)),
    ],
)
def test_a_pool_takes_what_the_index_leaves(
    tokens: int, seqs: int, params: dict[str, Any], pool: tuple[int, int]
) -> None:
    """Of half of 48 GiB, under half of the layers of a model of 14B."""
    shape, room = LayerShape(40, 8, 128, torch.bfloat16, torch.device("meta")), 10_464_625_664
    ledger = Ledger(room)
    runtime = Runtime([shape] * 20, compose(METHODS["auto"], **params), ledger, seqs, tokens + 32, fixed=True)
    assert 0.9 * room < ledger.held["gpu"] <= room
    assert pool[0] <= runtime.groups[0].cache.spec.plan.pool_blocks * 32 < pool[1]
    place = runtime.groups[0].executor
    assert place.staging.blocks > 100, "prompts have room too"
    runtime.release()


@pytest.mark.parametrize("seqs", [1, 2])
def test_pools_of_captured_steps_are_renewed_at_once_with_one_sequence_and_in_the_next_layer_with_more(
    seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others when the step cannot fail any more."""
    world = World(seqs)
    world.step(*[100] * seqs)
    group = world.runtime.groups[-1]
    order: list[tuple[str, int]] = []

    def note(what: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def noted(layer: int, *rest: Any) -> Any:
            order.append((what, layer))
            return own(layer, *rest)

        return noted

    monkeypatch.setattr(group.maintenance, "after", note("renewed", group.maintenance.after))
    monkeypatch.setattr(group.cache, "append", note("appended", group.cache.append))
    world.step(*[1] * seqs)
    assert order == [("appended", 0), ("appended", 1), ("renewed", 0), ("renewed", 1)]
    order.clear()
    running = world.runtime.begin_capture(seqs, host=True)
    for layer in range(2):
        q, k, v = (torch.randn(seqs, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        world.runtime.attend(running, layer, q, k, v, SCALE)
    next_layer = [("renewed", 0), ("appended", 1)]
    assert order == [("appended", 0), *(next_layer if seqs == 1 else reversed(next_layer)), ("renewed", 1)]
