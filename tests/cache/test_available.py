"""What is free is the least of what the machine and its control groups have, and more than that is never allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coattn.cache import available
from coattn.cache.blocks import BlockMemory
from coattn.cache.host_memory import Growing
from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.types import LayerShape, Tier

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, 40 of them available."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_control_groups(root: Path) -> None:
    assert available.memory(root) == (64 * GIB, 40 * GIB)


def test_a_group_that_allows_less(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user/job")
    group = root / "sys/fs/cgroup/user"
    write(group / "job/memory.max", "max")
    write(group / "job/memory.current", GIB)
    assert available.memory(root) == (64 * GIB, 40 * GIB)
    write(group / "memory.max", 8 * GIB)
    write(group / "memory.current", 5 * GIB)
    write(group / "memory.stat", f"anon {2 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}")
    assert available.memory(root) == (8 * GIB, 6 * GIB)


def test_a_group_that_is_over_its_limit_has_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/")
    write(root / "sys/fs/cgroup/memory.max", GIB)
    write(root / "sys/fs/cgroup/memory.current", 2 * GIB)
    assert available.memory(root) == (GIB, 0)


def test_this_machine() -> None:
    total, free = available.memory()
    assert 0 < free <= total


@pytest.mark.parametrize("tier", ["gpu", "host"], ids=["fast", "dram"])
def test_blocks_that_do_not_fit_are_never_allocated(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "memory", lambda: (512 << 20, 96 << 20))
    shape = LayerShape(q_heads=1, kv_heads=1, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    ledger = Ledger()
    memory = BlockMemory(tier, {0: shape, 1: shape}, 1024, ledger, "The window")  # 1 MiB a block
    memory.reserve(64)
    made: list[int] = []
    monkeypatch.setattr("torch.zeros", lambda *args, **options: made.append(1))
    with pytest.raises(BudgetError, match=r"The window needs 97\.0 MiB of KV memory .* only 96\.0 MiB is free"):
        memory.reserve(129)  # 65 more, and a layer of 64 twice
    assert memory.capacity == 64
    assert ledger.held[tier] == memory.bytes
    assert not made


def test_memory_that_grows_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "memory", lambda: (512 << 20, 96 << 20))
    memory = Growing(1 << 40)
    memory.grow(32 << 20)
    with pytest.raises(BudgetError, match=r"only 96\.0 MiB is free"):
        memory.grow(256 << 20)
    assert memory.committed < 256 << 20


def test_blocks_of_a_gpu_s_layers_are_held_against_free_dram(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape(8, 8, 128, torch.bfloat16, torch.device("cuda"))
    memory = BlockMemory("host", {0: shape}, 32, Ledger(), "Keeping every token")
    blocks = 2 * GIB // memory.block_bytes
    monkeypatch.setattr(available, "memory", lambda: (4 * GIB, GIB))
    with pytest.raises(BudgetError, match=r"only 1\.0 GiB is free"):
        memory.reserve(blocks)
