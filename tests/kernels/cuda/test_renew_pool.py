"""Pools after a step: the kernel of CUDA C++ against PyTorch, on a CPU thread by thread and on a GPU."""

import shutil
from dataclasses import fields

import pytest
import torch
from tests.kernels.cards import CARDS, fits
from tests.kernels.cuda.emulator import modules
from tests.kernels.pools import copied

from coattn.kernels import pool_memory, token_pool
from coattn.kernels.cuda import nvrtc
from coattn.kernels.cuda import renew_pool as cuda
from coattn.kernels.cuda.nvrtc import FOLDER
from coattn.kernels.pool_memory import COLD, NEVER, NONE, PoolTensors

HEADS, D, SLOTS, TOKENS = 2, 8, 4, 400
CPU = torch.device("cpu")


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("places", [32, 1000, 16384])
def test_compiles(places: int, card: int) -> None:
    form = cuda.constants(places)
    assert form["THREADS"] * form["EACH"] >= places
    assert fits((FOLDER / "renew_pool.cu").read_text(), form, card, form["THREADS"])


def filled(places: int, pins: int, packed: bool, hot: int) -> PoolTensors:
    torch.manual_seed(places)
    gpu = torch.zeros(SLOTS * places // 4, HEADS, 2, 4, D)
    pool = PoolTensors.make(gpu, 0, SLOTS, TOKENS, places, HEADS, pins, packed, hot)
    for slot, count in ((0, places), (1, 0), (2, places // 8 * 4)):
        tokens = torch.stack([torch.randperm(TOKENS)[:count] for _ in range(HEADS)])
        pool.fill(slot, tokens, torch.randn(HEADS, count, D), torch.randn(HEADS, count, D))
    return pool


def same(one: PoolTensors, two: PoolTensors) -> None:
    for name in ("place_of", "token_of", "age", "incoming", "clock", "num_incoming", "evict_age"):
        assert getattr(one, name).equal(getattr(two, name).cpu()), name
    # the same places, of which the kernel has others in front
    assert one.free_places.sort(-1).values.equal(two.free_places.cpu().sort(-1).values)
    two.free_places.copy_(one.free_places)
    if one.packed is not None and two.packed is not None:
        assert one.packed.count.equal(two.packed.count.cpu())
        assert one.packed.since.equal(two.packed.since.cpu())
        for slot in range(SLOTS - 1):
            for head in range(HEADS):
                count = int(one.packed.count[slot, head])
                assert one.packed.listed[slot, head, :count].equal(two.packed.listed[slot, head, :count].cpu())


def consistent(pool: PoolTensors) -> None:
    """Every token's place holds it, and what is listed is what is not cold."""
    assert pool.packed is not None
    for slot in range(SLOTS - 1):
        for head in range(HEADS):
            listed = pool.packed.listed[slot, head, : pool.packed.count[slot, head]].long()
            found = pool.place_of[slot, head].long()
            inside = (found >= 0).nonzero()[:, 0]
            place = found[inside] % COLD
            assert pool.token_of[slot, head, place].long().equal(inside)
            assert len(inside) == int((pool.token_of[slot, head] >= 0).sum())
            hot = place[found[inside] < COLD].sort().values
            assert hot.equal(listed)


def steps(world: str, hot: int, pins: int, count: int, monkeypatch: pytest.MonkeyPatch) -> PoolTensors:
    """Steps in which tokens are wanted and come, by PyTorch and by the kernel."""
    packed, places = world != "model", 96
    for module in (pool_memory, token_pool, cuda):
        monkeypatch.setattr(module, "FRESH", 24)
    pool = filled(places, pins, packed, hot)
    if packed:
        consistent(pool)
    device = torch.device("cuda") if world == "gpu" else CPU
    other, seq = copied(pool, device), torch.tensor([2, 3, 0], dtype=torch.int32)
    for step in range(count):
        wanted = torch.rand(3, HEADS, TOKENS) < 0.02 * (step % 7)
        for row, slot in enumerate(seq.tolist()[::2]):
            for head in range(HEADS):
                outside = (pool.place_of[slot, head, :TOKENS] < 0).nonzero()[:, 0]
                coming = outside[torch.randperm(len(outside))[: 3 * row + step % 5]].int()
                room = pool.free_places[slot, head, : len(coming)] >= 0
                for each in (pool, other):
                    coming = torch.where(room, coming, NONE)
                    each.incoming[slot, head, : len(coming)] = coming.to(each.incoming.device)
                    each.num_incoming[slot, head] = len(coming)
        for each in (pool, other):
            each.touch(seq.to(each.age.device), wanted.to(each.age.device))
        token_pool.renew_pool(pool, seq)
        cuda.renew_pool(other, seq.to(device))
        same(pool, other)
        if packed:
            consistent(pool)
    return pool


CASES = [("int8", 40, 12), ("int8", 8, 12), ("int8", 16, 0), ("int8", 4096, 8), ("model", 40, 12)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(("world", "hot", "pins"), CASES)
def test_emulated(
    world: str, hot: int, pins: int, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(cuda, "module", modules(tmp_path_factory.getbasetemp()))
    pool = steps(world, hot, pins, 12, monkeypatch)
    assert (pool.age[1] == NEVER).all()
    if pool.packed is not None and hot < 96:
        assert (pool.place_of[0] >= COLD).any()
        assert int(pool.packed.count[0].max()) < 96 <= int((pool.token_of[0, 0] >= 0).sum())
        assert (pool.packed.listed[0, :, :pins] == torch.arange(pins)).all()
    assert int((pool.free_places[0] >= 0).sum()) == HEADS * 24


@pytest.mark.gpu
@pytest.mark.parametrize(("hot", "pins"), [(40, 12), (16, 0)])
def test_equals_the_reference(hot: int, pins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps("gpu", hot, pins, 20, monkeypatch)


def test_fields_are_all_compared() -> None:
    """Books that a step writes elsewhere: scores and what was attended."""
    others = {"gpu", "first", "num_attended", "bound_margin", "last_margin", "est_lse", "true_lse", "pins", "packed"}
    seen = {"place_of", "token_of", "age", "free_places", "incoming", "clock", "num_incoming", "evict_age"}
    assert {x.name for x in fields(PoolTensors)} == others | seen
