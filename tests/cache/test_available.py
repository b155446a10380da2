"""What is free is the least of what the machine and its control groups have, and more than that is never allocated."""

from pathlib import Path

import pytest
import torch

from coattn.cache import available
from coattn.cache.blocks import BlockMemory
from coattn.cache.host_memory import Growing
from coattn.cache.ledger import Dram, Ledger
from coattn.errors import BudgetError
from coattn.types import LayerShape, Tier

GIB = 1 << 30
SHAPE = LayerShape(q_heads=1, kv_heads=1, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))


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


def test_a_container_of_version_1(root: Path) -> None:
    """Inside, the path is often that outside, and only the folder above all groups is there."""
    write(root / "proc/self/cgroup", "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n1:name=systemd:/")
    group = root / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", 4 * GIB)
    write(group / "memory.usage_in_bytes", 3 * GIB)
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0")
    assert available.memory(root) == (4 * GIB, 2 * GIB)
    write(group / "memory.limit_in_bytes", 9223372036854771712)
    assert available.memory(root) == (64 * GIB, 40 * GIB)


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
    ledger = Ledger()
    memory = BlockMemory(tier, {0: SHAPE, 1: SHAPE}, 1024, ledger, "The window")  # 1 MiB a block
    memory.reserve(64)
    made: list[int] = []
    monkeypatch.setattr("coattn.cache.blocks.host_memory", lambda *_: made.append(1))
    with pytest.raises(BudgetError, match=r"The window needs 97\.0 MiB of KV memory .* only 96\.0 MiB is free"):
        memory.reserve(129)  # 65 more, and a layer of 64 twice
    assert memory.capacity == 64
    assert ledger.held[tier] == memory.bytes
    assert not made


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("tier", ["gpu", "host"], ids=["fast", "dram"])
def test_blocks_take_memory_as_they_are_written(tier: Tier) -> None:
    memory, before = BlockMemory(tier, {0: SHAPE, 1: SHAPE}, 1024, Ledger(), "It"), resident()  # 1 MiB a block
    memory.fix(512)
    assert resident() - before < 64 << 20
    assert memory.bytes == 512 << 20
    memory[1][300:304] = 1
    assert resident() - before < 64 << 20
    assert not memory[0][300].any()


def test_memory_that_the_system_refuses_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    memory = BlockMemory("gpu", {0: SHAPE}, 1024, Ledger(), "Keeping every token")
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(BudgetError, match=r"Keeping every token needs 8\.0 MiB of KV memory .* more than is free"):
        memory.fix(16)
    assert memory.capacity == 0


def test_tiers_in_one_memory_are_held_against_it_together() -> None:
    ledger = Ledger(None, None, Dram(4 * GIB, 2 * GIB, ("gpu", "host")))
    ledger.take("gpu", GIB, "A window")
    assert ledger.room("gpu") is None, "no limit that a window would be chosen by"
    assert ledger.left("gpu") == ledger.left("host") == GIB
    with pytest.raises(
        BudgetError, match=r"It needs 2\.5 GiB .* only 2\.0 GiB is free for it on this machine"
    ) as refused:
        ledger.take("host", 3 * GIB // 2, "It")
    assert "max_length" in refused.value.hint
    assert ledger.held == {"gpu": GIB, "host": 0}


def test_a_budget_larger_than_the_machine_is_refused_once_it_is_used() -> None:
    ledger = Ledger(None, 64 * GIB, Dram(4 * GIB, 2 * GIB, ("host",)))
    ledger.take("host", 3 * GIB, "It")
    with pytest.raises(BudgetError, match=r"the 4\.0 GiB of this machine are all there is") as refused:
        ledger.take("host", 2 * GIB, "It")
    assert f"host_kv to {4 * GIB} bytes" in refused.value.hint


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
