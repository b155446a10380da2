"""Between PCIe and the CPU: the division finds its place on slow and fast machines, and stays there."""

from __future__ import annotations

import random

import pytest
import torch

from coattn.handover.entries import balanced, given

MACHINES = {
    "even": (1.0, 1.0, 10),
    "fast CPU": (1.0, 0.35, 20),
    "slow CPU": (1.0, 4.0, 20),
    "very slow CPU": (1.0, 16.0, 20),
    "slow link": (4.0, 0.35, 20),
    "very slow link": (16.0, 1.0, 20),
    "slow to hand over": (0.2, 0.2, 60),
}
"""Microseconds of an entry a KV head that the GPU fetches, that the CPU attends to, and of the CPU's beginning."""
BEFORE = 15
"""Microseconds of the GPU's part with nothing fetched."""


def lists(wanted: list[int], stay: int) -> tuple[float, torch.Tensor]:
    """Entries that the GPU fetches, the mean over heads, and the CPU's lists."""
    cpu = torch.tensor([max(0, n - stay) for n in wanted])
    return sum(min(n, stay) for n in wanted) / len(wanted), cpu


def step(machine: tuple[float, float, int], wanted: list[int], stay: int) -> tuple[float, float, torch.Tensor]:
    """How long the GPU's part takes and the CPU's, and its lists."""
    fetch, attend, begin = machine
    gpu, cpu = lists(wanted, stay)
    return BEFORE + fetch * gpu, begin + attend * float(cpu.sum()) / len(wanted), cpu


@pytest.mark.parametrize("start", [0, 64, 512])
@pytest.mark.parametrize("name", MACHINES)
def test_no_machine_takes_much_longer_than_by_the_better_path_alone(name: str, start: int) -> None:
    """Heads want different numbers, which change from step to step; times are noisy."""
    draws, machine, stay = random.Random(1), MACHINES[name], start
    taken, alone = [], {0: [], 512: []}  # type: ignore[var-annotated]
    for look in range(120):
        wanted = [max(0, round(draws.gauss(96, 20))) for _ in range(64)]
        own, other, cpu = step(machine, wanted, stay)
        if look >= 60:
            taken.append(max(own, other))
            for single, times in alone.items():
                times.append(max(step(machine, wanted, single)[:2]))
        noisy = [int(1000 * time * draws.uniform(0.97, 1.03)) for time in (own, other)]
        stay = max(0, min(512, balanced(stay, noisy[0], noisy[1], given(cpu))))
    best = min(sum(times) for times in alone.values())
    assert sum(taken) < 1.05 * best
    if name == "even":
        assert sum(taken) < 0.75 * best, "both together are faster than either"


def test_nothing_moves_where_both_are_done_at_once() -> None:
    assert balanced(64, 1000, 1040, 30.0) == 64
    assert balanced(64, 1000, 2000, 0.0) == 64, "the CPU has nothing that could be taken from it"
    assert balanced(64, 2000, 1000, 0.0) == 54
    assert given(torch.tensor([[0, 4], [8, 0]])) == 6
