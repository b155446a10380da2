"""A pool of resident blocks in GPU memory: what is resident, what is missed, what is brought in when."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from tests.parts.select.test_digest_top import BLOCK, World, tokens_of
from tests.parts.select.test_digest_top import wanted as picked_of

from coattn.errors import BudgetError
from coattn.parts.maintenance.recall.recall import Recall
from coattn.types import Step

SCOUT = {"block": BLOCK, "window_blocks": 2}


class Scout(World):
    """The same sequences over a cache in DRAM with residents."""

    def __init__(self, gpu: int | None = None, tokens: int | None = None, **params: Any) -> None:
        super().__init__("scout", gpu, tokens, **{**SCOUT, **params})

    @property
    def maintenance(self) -> Recall:
        return cast("Recall", self.group.maintenance)

    @property
    def owned(self) -> dict[int, list[int]]:
        return self.group.cache.host.table.owned

    def split(self, slot: int) -> tuple[list[list[int]], list[list[int]]]:
        """Numbers of the older blocks that the last step attended to on the GPU and in DRAM, per KV head."""
        gpu, host = self.picked[-1].gpu, self.picked[-1].host
        assert gpu is not None
        places = self.maintenance.places
        first = self.maintenance.residency.first + slot * places
        held = self.before[slot].tolist()
        owned = self.owned[slot]
        here, there = [], []
        for head in range(2):
            ids = gpu.table[slot, head, : -(-int(gpu.tokens[slot, head]) // BLOCK)].tolist()
            here.append(sorted(held[head][i - first] for i in ids if first <= i < first + places))
            some = [] if host is None else host.table[slot, head, : int(host.tokens[slot, head]) // BLOCK].tolist()
            there.append(sorted(owned.index(i) for i in some))
        return here, there

    def step(self, new: tuple[int, ...] = (1, 1)) -> torch.Tensor:
        # residents are chosen when a step is planned
        if new == (1, 1):
            step = Step.of((0, 1), self.lengths, new)
            self.group.cache.plan(step)
            self.maintenance.plan(step)
        self.before = self.maintenance.residency.held[0].clone()
        return super().step(new)

    def check(self) -> None:
        """Every resident is a copy of its block in DRAM, and no head holds one twice."""
        maintenance, cache = self.maintenance, self.group.cache
        assert cache.host is not None
        for slot in range(2):
            for head in range(2):
                held = maintenance.residency.held[0][slot, head].tolist()
                assert len({b for b in held if b >= 0}) == sum(b >= 0 for b in held)
                for place, b in enumerate(held):
                    if b >= 0:
                        here = cache.gpu.memory[0][
                            maintenance.residency.first + slot * maintenance.places + place, head
                        ]
                        assert torch.equal(here, cache.host.memory[0][self.owned[slot][b], head])


def decoded(world: Scout) -> Iterator[None]:
    """Decode steps with a turn between them; yields after each decode step."""
    for new in (*[(1, 1)] * 9, (6, 3), *[(1, 1)] * 7):
        world.step(new)
        world.check()
        if new == (1, 1):
            yield


def wanted(q: torch.Tensor, keys: torch.Tensor, count: int) -> list[list[int]]:
    return picked_of(q, keys, count, slack=0.5, older=True, sinks=1)


def older(blocks: list[list[int]]) -> list[list[int]]:
    return [head[:-2] for head in blocks]


def check_parts(world: Scout, count: int) -> tuple[int, int]:
    """The last step attended near to every resident block, far to what the rule picks beside. Returns how many blocks
    of both heads were attended without being picked, and how many far."""
    near, far = world.split(0)
    keys = world.seen[0][0]
    first = -(-len(keys) // BLOCK) - 2
    beside = 0
    for head, ruled in enumerate(older(wanted(world.q[0], keys, count))):
        held = [b for b in world.before[0, head].tolist() if 0 <= b < first]
        assert near[head] == sorted(held)
        assert far[head] == sorted(set(ruled) - set(held))
        beside += len(set(held) - set(ruled))
    return beside, sum(map(len, far))


@pytest.mark.parametrize("recall_interval", [0, 1, 3])
@pytest.mark.parametrize("pool_blocks", [None, 2, 9])
def test_attends_to_every_resident_and_to_what_the_rule_misses(recall_interval: int, pool_blocks: int | None) -> None:
    world = Scout(budget=24, recall_interval=recall_interval, pool_blocks=pool_blocks)
    more = missed = 0
    for _ in decoded(world):
        beside, there = check_parts(world, 6)
        more, missed = more + beside, missed + there
        near, far = world.split(0)
        first = -(-world.lengths[0] // BLOCK) - 2
        blocks = [[*here, *there, first, first + 1] for here, there in zip(near, far, strict=True)]
        world.check_output([tokens_of(each, world.lengths[0]) for each in blocks])
    assert more
    assert missed


def test_the_first_residents_are_what_the_last_query_of_the_prompt_wants() -> None:
    world = Scout(budget=24)
    prompt = world.q[60]
    step = Step.of((0, 1), world.lengths, (1, 1))
    world.group.cache.plan(step)
    world.maintenance.plan(step)
    # 62 tokens with the next one: 16 blocks, of which 14 are older than the window
    expected = wanted(prompt, world.seen[0][0][: 14 * BLOCK], 6)
    full = [sorted(head.tolist()) for head in world.maintenance.residency.held[0][0]]
    by_score = [set(head[:-2]) for head in expected]
    assert all(len(head) == 4 for head in full)
    # `wanted` always takes the two newest blocks, the pool takes the best wherever they are
    assert all(len(want - set(have)) <= 2 for want, have in zip(by_score, full, strict=True))
    assert [sorted(head.tolist()) for head in world.maintenance.residency.held[0][1]] == [[-1, -1, 0, 1]] * 2


def test_without_recall_residents_stay_and_with_it_misses_come_in_one_step_later() -> None:
    world = Scout(budget=24, recall_interval=0)
    world.step()
    held = world.maintenance.residency.held[0].clone()
    for _ in range(6):
        world.step()
    assert torch.equal(world.maintenance.residency.held[0][0], held[0])
    # the short sequence has empty places, which its blocks get as they fill
    assert (held[1].tolist(), world.maintenance.residency.held[0][1].tolist()) == (
        [[0, 1, -1, -1]] * 2,
        [[0, 1, 2, 3]] * 2,
    )

    world = Scout(budget=24, recall_interval=4)
    moved = []
    for _ in range(12):
        world.step()
        misses = world.split(0)[1]
        now = [set(head.tolist()) for head in world.maintenance.residency.held[0][0]]
        changed = not torch.equal(world.before[0], world.maintenance.residency.held[0][0])
        if world.lengths[0] % 4 == 0:
            assert all(set(miss) <= have for miss, have in zip(misses, now, strict=True))
            moved.append(changed)
        else:
            assert not changed
    assert any(moved)


def test_blocks_that_are_taken_back_are_no_longer_resident() -> None:
    world = Scout(budget=24)
    for _ in range(3):
        world.step()
    world.take_back(30)
    assert int(world.maintenance.residency.held[0][0].max()) < 30 // BLOCK
    for _ in range(12):
        world.step()
        world.check()
        check_parts(world, 6)


def test_it_says_how_much_each_side_attended_to() -> None:
    world = Scout(budget=24)
    world.step()
    near, far = world.picked[-1].gpu, world.picked[-1].host
    step = Step.of((0, 1), (61, 9), (1, 1))
    assert world.runtime.attended(step) == (
        round(near.tokens.float().mean(1).sum().item()),
        round(far.tokens.float().mean(1).sum().item()),
    )


def test_pools_and_digests_are_counted() -> None:
    world = Scout(None, 80, budget=24)
    token = 2 * 2 * 16 * 4
    # of each sequence: two blocks of the window, four residents, and the digests of twenty blocks
    assert world.ledger.held["gpu"] == 2 * (6 * BLOCK + 20) * token
    with pytest.raises(BudgetError, match="needs at least") as caught:
        Scout(100, 80, budget=24)
    assert caught.value.least == world.ledger.held["gpu"]
    world.runtime.release()
    assert world.ledger.held == {"gpu": 0, "host": 0}
