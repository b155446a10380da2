"""The arena: fixed addresses, a budget, honest books."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coattn import native


def test_blocks_are_aligned_writable_and_do_not_move():
    arena = native.Arena(16384, 64 << 20)
    ids = arena.allocate(10)
    base = arena.base
    assert base % 64 == 0
    assert len(set(ids)) == 10
    arena.memory()[ids[3]] = 7
    view = arena.memory()
    arena.allocate(3000)  # grows
    assert arena.base == base
    assert (view[ids[3]] == 7).all()
    assert (arena.memory()[ids[3]] == 7).all()
    arena.check_integrity()
    stats = arena.stats()
    assert stats.used_blocks == 3010
    assert stats.used_blocks * 16384 <= stats.committed_bytes <= 64 << 20
    assert stats.touch_seconds > 0


def test_a_view_keeps_the_arena_alive():
    arena = native.Arena(4096, 1 << 20)
    arena.allocate(4)
    view = arena.memory()
    view[2] = 9
    del arena
    gc.collect()
    assert (view[2] == 9).all()


@pytest.mark.parametrize("block_bytes", [64, 4864, 8832, 16384, 200_000])
def test_the_budget_is_kept_to_the_block(block_bytes):
    arena = native.Arena(block_bytes, 100 * block_bytes + 63)
    ids = arena.allocate(99)
    assert arena.stats().capacity_blocks == 100
    with pytest.raises(native.NativeError, match="99 are in use and 2 more were asked for") as caught:
        arena.allocate(2)
    assert "budget" in caught.value.hint
    ids += arena.allocate(1)
    assert sorted(ids) == list(range(100))
    memory = arena.memory()
    memory[99] = 1  # the last byte of the last block is mapped
    arena.check_integrity()
    arena.free(ids)
    assert arena.stats().used_blocks == 0
    assert arena.stats().peak_blocks == 100


def test_growing_ahead():
    arena = native.Arena(4096, 8 << 20)
    arena.grow(5 << 20)
    assert arena.committed_blocks() >= (5 << 20) // 4096
    committed = arena.stats().committed_bytes
    arena.allocate((5 << 20) // 4096)
    assert arena.stats().committed_bytes == committed
    with pytest.raises(native.NativeError, match="of a budget of"):
        arena.grow(9 << 20)


def test_double_frees_are_refused_and_change_nothing():
    arena = native.Arena(64, 1 << 20)
    ids = arena.allocate(5)
    arena.free(ids[:1])
    for bad in (ids[:1], [ids[1], ids[1]], [-1], [10**6], [ids[2], ids[0]]):
        with pytest.raises(native.NativeError, match="is not in use"):
            arena.free(bad)
        arena.check_integrity()
        assert arena.stats().used_blocks == 4


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_books_agree_after_any_sequence(steps):
    arena = native.Arena(4096, 300 * 4096)
    held: list[int] = []
    for take, n in steps:
        if take and len(held) + n <= 300:
            held += arena.allocate(n)
        elif not take:
            back, held = held[:n], held[n:]
            arena.free(back)
        assert len(set(held)) == len(held)
        arena.check_integrity()
        assert arena.stats().used_blocks == len(held)


def test_cuda_registration_or_its_reason():
    reason = native.cuda_unavailable(0)
    if reason is None:
        arena = native.Arena(16384, 8 << 20, cuda_device=0)
        arena.allocate(100)
        assert arena.stats().registered_bytes == arena.stats().committed_bytes
        assert torch.cuda.is_available()
    else:
        with pytest.raises(native.NativeError) as caught:
            native.Arena(16384, 8 << 20, cuda_device=0)
        assert reason in caught.value.sentence


def test_refusals():
    with pytest.raises(native.NativeError, match="multiple of 64"):
        native.Arena(100, 1 << 20)
    with pytest.raises(native.NativeError, match="holds no block"):
        native.Arena(4096, 100)
