"""The arena: fixed addresses, a budget, memory that a GPU knows."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from coattn import native

PAGE = 2 << 20


@pytest.mark.parametrize("alone", [False, True])
def test_memory_is_aligned_writable_and_does_not_move(alone: bool) -> None:
    arena = native.Arena(64 << 20)
    arena.grow(1 << 20, alone)
    base = arena.base
    assert base % PAGE == 0
    view = arena.memory()
    assert (view == 0).all()
    view[3] = 7
    arena.grow(48 << 20, alone)
    assert arena.base == base
    assert view[3] == 7
    assert arena.memory()[3] == 7
    assert len(arena.memory()) == arena.committed == 48 << 20


def test_a_view_keeps_the_arena_alive() -> None:
    arena = native.Arena(1 << 20)
    arena.grow(4096)
    view = arena.memory()
    view[2] = 9
    del arena
    gc.collect()
    assert view[2] == 9


@pytest.mark.parametrize("budget", [1, 4864, PAGE, PAGE + 1, 20_000_000])
def test_the_budget_is_kept(budget: int) -> None:
    arena = native.Arena(budget)
    assert len(arena.memory()) == 0
    with pytest.raises(native.NativeError, match="of a budget of") as caught:
        arena.grow(budget + 1)
    assert "budget" in caught.value.hint
    assert arena.committed == 0
    arena.grow(budget)
    assert budget <= arena.committed < budget + PAGE
    arena.memory()[-1] = 1  # the last byte of the last page is mapped


def test_growing_to_what_is_there_changes_nothing() -> None:
    arena = native.Arena(8 << 20)
    arena.grow(5 << 20)
    before = arena.committed
    assert before >= 5 << 20
    arena.grow(1 << 20)
    arena.grow(5 << 20)
    assert arena.committed == before


@pytest.mark.gpu
def test_a_gpu_knows_registered_memory() -> None:
    arena = native.Arena(8 << 20, torch.device("cuda"))
    arena.grow(5 << 20)
    view = arena.memory()
    assert view.is_pinned()
    there = torch.arange(100, dtype=torch.uint8, device="cuda")
    view[:100].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(view[:100], there.cpu())


def stand_in(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> dict[int, int]:
    """Instead of CUDA: what is registered; every registration is answered with `code`."""
    pieces: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        assert flags == 3, "portable and mapped"
        pieces[address] = nbytes
        return code

    cudart = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=pieces.pop, cudaGetErrorString=lambda code: f"error {code}"
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return pieces


def test_what_grows_is_registered_piece_by_piece_until_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = stand_in(monkeypatch)
    arena = native.Arena(8 << 20, torch.device("cuda"))
    arena.grow(3 << 20)
    arena.grow(1 << 20)
    arena.grow(5 << 20)
    assert pieces == {arena.base: 4 << 20, arena.base + (4 << 20): 2 << 20}
    view = arena.memory()
    del arena
    gc.collect()
    assert len(pieces) == 2, "somebody may still read it"
    del view
    gc.collect()
    assert pieces == {}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_gpu_is_done_with_memory_before_it_is_unregistered(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the last call may still read it. A GPU that has failed reads no more."""
    pieces = stand_in(monkeypatch)
    there: list[tuple[torch.device, int]] = []

    def wait(device: torch.device) -> None:
        there.append((device, len(pieces)))
        if broken:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    device = torch.device("cuda", 1)
    arena = native.Arena(8 << 20, device)
    arena.grow(1 << 20)
    arena.grow(5 << 20)
    del arena
    gc.collect()
    assert there == [(device, 2)]
    assert pieces == {}


@pytest.mark.gpu
def test_a_kernel_that_reads_memory_nobody_has_any_more_reads_it_to_its_end() -> None:
    arena = native.Arena(64 << 20, torch.device("cuda"))
    arena.grow(64 << 20)
    view = arena.memory()
    view.fill_(3)
    torch.cuda._sleep(200_000_000)
    copy = view.to("cuda", non_blocking=True)
    del arena, view
    gc.collect()
    assert bool((copy == 3).all())


def test_memory_that_cuda_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 2)
    arena = native.Arena(8 << 20, torch.device("cuda"))
    with pytest.raises(native.NativeError, match="refused to register 2097152 bytes: error 2") as caught:
        arena.grow(1)
    assert "ulimit" in caught.value.hint


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(native.NativeError, match="holds nothing"):
        native.Arena(0)
