"""The table of a decode step: what it says, and that it grows with the sequences whose length nobody knew."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cache.integrity import check_blocks
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.ledger import Ledger
from coattn.cache.step_table import NO_BLOCK, HostBridge, StepTable, TableMemory
from coattn.errors import BudgetError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import BlockList, LayerShape, Step

SHAPE = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
CPU = torch.device("cpu")


def test_numbers_are_written_for_every_row_and_lists_only_when_they_change() -> None:
    memory = TableMemory({"block": 0, "list": 3, "offset": 0}, 4, CPU)
    memory.write({"block": [7, 8], "offset": [1]}, {"block": 99})
    assert memory.host("block").tolist() == [7, 8, 99, 99]
    assert memory.device_rows("offset", 2).tolist() == [1, 0]
    made: list[int] = []

    def ids(first: int) -> Tensor:
        made.append(first)
        return torch.tensor([first, first + 1])

    for key, first in (("a", 5), ("a", 6), ("b", 7)):
        memory.set_list("list", 1, key, lambda first=first: ids(first))  # type: ignore[misc]
    assert made == [5, 7]
    assert memory.host("list").tolist() == [[0, 0, 0], [7, 8, 0], [0, 0, 0], [0, 0, 0]]
    assert memory.has("list")
    assert not memory.has("other")
    memory.write({"block": [], "offset": []}, {})
    assert memory.host("block").tolist() == [0, 0, 0, 0]
    assert memory.host("list")[1].tolist() == [7, 8, 0]


def test_a_list_is_as_long_as_the_host_knows_or_as_there_is_room() -> None:
    memory = TableMemory({"gpu_lens": 0, "gpu_blocks": 3, "host_lens": 0, "host_blocks": 5}, 2, CPU)
    memory.write({"gpu_lens": [9], "host_lens": [12]}, {})
    known = StepTable(memory, 1, 4, True, HostBridge(), {"gpu": 9, "host": 12}).visible()
    unknown = StepTable(memory, 2, 4, True, HostBridge()).visible()
    assert (known.gpu.longest, known.host.longest) == (9, 12)
    assert (unknown.gpu.longest, unknown.host.longest) == (12, 20)
    assert unknown.gpu.tokens.tolist() == [[9], [0]]
    assert StepTable(memory, 1, 4, False, HostBridge()).visible().host is None
    assert StepTable(memory, 1, 4, False, HostBridge()).flush_to is None


def test_the_table_of_blocks_grows_and_keeps_what_it_has() -> None:
    table = BlockTable(BlockMemory("host", {0: SHAPE}, 4, Ledger(), "test"))
    table.tabulate(2, 3)
    table.ensure(0, 3)
    first = table.rows
    table.ensure(0, 2)
    assert table.rows is first
    table.ensure(1, 4)
    assert table.rows.shape == (2, 6)
    table.ensure(5, 1)
    assert table.rows.shape == (6, 6)
    table.ensure(0, 20)
    assert table.rows.shape == (6, 20)
    for slot, owned in table.owned.items():
        assert table.rows[slot, : len(owned)].tolist() == owned
    versions = dict(table.list_version)
    table.ensure(0, 20)
    assert table.list_version == versions
    table.shrink(0, 2)
    table.ensure(0, 5)
    assert table.list_version[0] == versions[0] + 2
    assert table.rows[0, :5].tolist() == table.owned[0]
    check_blocks(table)


def test_sequences_grow_together_or_not_at_all() -> None:
    memory = BlockMemory("host", {0: SHAPE}, 4, Ledger(host=8 * 4 * SHAPE.token_bytes), "test")
    table = BlockTable(memory)
    table.tabulate(3, 8)
    table.grow([(0, 3), (1, 0), (2, 2)])
    assert {slot: len(ids) for slot, ids in table.owned.items()} == {0: 3, 1: 0, 2: 2}
    versions = dict(table.list_version)
    table.grow([(0, 2), (1, 0), (2, 2)])  # all have enough
    assert table.list_version == versions
    with pytest.raises(BudgetError):
        table.grow([(0, 5), (1, 1), (2, 3), (3, 1)])
    assert {slot: len(ids) for slot, ids in table.owned.items()} == {0: 3, 1: 0, 2: 2}
    table.grow([(0, 5), (1, 1), (2, 2)])
    assert [len(table.owned[slot]) for slot in range(3)] == [5, 1, 2]
    check_blocks(table)


ROWS: list[tuple[str, dict[str, Any]]] = [
    ("full", {"block": 8}),
    ("offload", {"block": 8, "window_blocks": 2}),
    ("cpu", {"block": 8, "window_blocks": 2}),
    ("quest", {"block": 8, "budget": 48, "dense_layers": 0}),
    ("scout", {"block": 8, "budget": 48, "recall_interval": 2, "pool_blocks": 3}),
    ("hgca", {"block": 8, "window_blocks": 2, "beta": 0.5}),
    ("hcattention", {"block": 8, "window_blocks": 1, "groups": 4, "centroids": 16, "tau": 0.8}),
    ("streaming", {"block": 8, "sinks": 3, "recent": 20}),
]


class Run:
    """Two layers, one of which may look back a few tokens, and the same numbers in every run."""

    def __init__(self, method: str, params: dict[str, Any], tokens: int | None, window: int | None = None) -> None:
        layers = [SHAPE, replace(SHAPE, sliding_window=window)]
        self.runtime = Runtime(layers, compose(METHODS[method], **params), Ledger(), 3, tokens)
        self.draws = torch.Generator().manual_seed(4)
        self.lengths: dict[int, int] = {}

    def step(self, slots: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
        step = Step.of(slots, tuple(self.lengths.get(slot, 0) for slot in slots), new)
        running = self.runtime.begin(step)
        outs = []
        for layer in range(2):
            q, k, v = (torch.randn(step.tokens, heads, 16, generator=self.draws) for heads in (4, 2, 2))
            outs.append(self.runtime.attend(running, layer, q, k, v, 0.3))
        self.runtime.commit(running)
        self.tables = running.tables
        self.lengths |= dict(zip(slots, step.lengths, strict=True))
        return torch.stack(outs)

    def memories(self) -> list[TableMemory]:
        return [group.cache.tables for group in self.runtime.groups]

    def steps(self) -> list[Tensor]:
        """Decode steps in which sequences join, pass what there was room for, and change rows."""
        self.step((2,), (9,))
        outs = [self.step((2,), (1,)) for _ in range(4)]
        self.step((0,), (30,))
        outs += [self.step((2, 0), (1, 1)) for _ in range(20)]
        self.step((1,), (150,))
        outs += [self.step((1, 2, 0), (1, 1, 1)) for _ in range(20)]
        self.step((0, 2), (60, 7))
        return outs + [self.step((0, 1), (1, 1)) for _ in range(12)]


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("method", "params"), ROWS)
def test_sequences_of_unknown_length_outgrow_their_table_and_see_the_same(
    method: str, params: dict[str, Any], window: int | None
) -> None:
    known, unknown = Run(method, params, 256, window), Run(method, params, None, window)
    torch.testing.assert_close(unknown.steps(), known.steps(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "params"), ROWS[:-1])
def test_a_table_is_made_anew_only_when_it_is_too_narrow(method: str, params: dict[str, Any]) -> None:
    run = Run(method, params, None)
    run.step((0,), (9,))
    run.step((0,), (1,))
    (first,) = run.memories()
    run.step((0,), (1,))
    assert run.memories() == [first]
    run.step((0,), (97,))
    run.step((0,), (1,))
    (second,) = run.memories()
    assert second is not first
    table = run.tables[0]
    assert table.memory is second
    run.step((0,), (1,))
    assert run.memories() == [second]


def test_every_group_of_layers_has_a_table_of_its_own() -> None:
    run = Run("cpu", {"block": 8, "window_blocks": 2}, None, window=11)
    run.step((0, 1), (40, 3))
    run.step((1, 0), (1, 1))
    sliding, tiered = (run.tables[min(group.cache.spec.layers)] for group in run.runtime.groups)
    host = run.runtime.groups[1].cache.host
    assert host is not None
    assert sliding.memory is not tiered.memory
    assert not sliding.memory.has("host_blocks")
    assert not sliding.host
    assert tiered.host
    assert sliding.column("gpu_lens").tolist() == [4, 11]
    # 41 tokens are six blocks of eight: two are on the GPU
    assert tiered.column("gpu_lens").tolist() == [4, 9]
    assert tiered.column("host_lens").tolist() == [0, 32]
    assert tiered.column("host_blocks")[1, :4].tolist() == host.table.owned[0][:4]
    assert tiered.flush_to.tolist() == [NO_BLOCK, NO_BLOCK]
    # four more tokens fill the first block of the short one, whose block in DRAM then stands in the table
    for _ in range(4):
        run.step((1, 0), (1, 1))
    table = run.tables[min(run.runtime.groups[1].cache.spec.layers)]
    assert table.flush_to.tolist() == [host.table.owned[1][0], NO_BLOCK]
    assert table.column("write_offset").tolist() == [7, 4]


def test_a_list_in_reach_has_one_row_for_each_sequence() -> None:
    table = torch.arange(5 * 2 * 3, dtype=torch.int32).view(5, 2, 3)
    tokens = torch.arange(10, dtype=torch.int32).view(5, 2)
    owned = BlockList(table, tokens, 12, owners=torch.tensor([3, 0, 4], dtype=torch.int32)).in_reach(2)
    assert torch.equal(owned.table, table[[3, 0]])
    assert torch.equal(owned.tokens, tokens[[3, 0]])
    assert (owned.owners, owned.longest) == (None, 12)
    plain = BlockList(table, tokens, 12).in_reach(3)
    assert torch.equal(plain.table, table[:3])
    assert torch.equal(plain.tokens, tokens[:3])
    on_host = BlockList(table + 1, tokens, 12)
    there = BlockList(table, tokens, 12, on_host=on_host).in_reach(4)
    assert torch.equal(there.table, table[:4] + 1)
    assert there.on_host is None
