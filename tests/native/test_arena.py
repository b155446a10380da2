"""The arena: fixed addresses, a budget."""

import gc

import pytest
import torch

from coattn import native


def test_blocks_are_aligned_writable_and_do_not_move():
    arena = native.Arena(16384, 64 << 20)
    arena.grow(1 << 20)
    base = arena.base
    assert base % 64 == 0
    view = arena.memory()
    assert (view == 0).all()
    view[3] = 7
    arena.grow(48 << 20)
    assert arena.base == base
    assert (view[3] == 7).all()
    assert (arena.memory()[3] == 7).all()
    assert len(arena.memory()) == arena.committed_blocks() >= 3072
    stats = arena.stats()
    assert 48 << 20 <= stats.committed_bytes <= 64 << 20
    assert stats.registered_bytes == 0
    assert stats.touch_seconds > 0


def test_a_view_keeps_the_arena_alive():
    arena = native.Arena(4096, 1 << 20)
    arena.grow(4 * 4096)
    view = arena.memory()
    view[2] = 9
    del arena
    gc.collect()
    assert (view[2] == 9).all()


@pytest.mark.parametrize("block_bytes", [64, 4864, 8832, 16384, 200_000])
def test_the_budget_is_kept_to_the_block(block_bytes):
    arena = native.Arena(block_bytes, 100 * block_bytes + 63)
    assert arena.stats().capacity_blocks == 100
    assert len(arena.memory()) == 0
    with pytest.raises(native.NativeError, match="of a budget of") as caught:
        arena.grow(100 * block_bytes + 64)
    assert "budget" in caught.value.hint
    assert arena.committed_blocks() == 0
    arena.grow(100 * block_bytes + 63)
    memory = arena.memory()
    assert memory.shape == (100, block_bytes)
    memory[99] = 1  # the last byte of the last block is mapped


def test_growing_to_what_is_there_changes_nothing():
    arena = native.Arena(4096, 8 << 20)
    arena.grow(5 << 20)
    before = arena.stats()
    assert before.committed_bytes >= 5 << 20
    arena.grow(1 << 20)
    arena.grow(5 << 20)
    assert arena.stats() == before


def test_cuda_registration_or_its_reason():
    reason = native.cuda_unavailable(0)
    if reason is None:
        arena = native.Arena(16384, 8 << 20, cuda_device=0)
        arena.grow(100 * 16384)
        assert arena.stats().registered_bytes == arena.stats().committed_bytes > 0
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
