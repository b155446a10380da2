"""Lists of chosen entries: they hold what was put, in order, and give their blocks back."""

import itertools
import threading
import time

import pytest
import torch

from coattn import native
from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.kernels.quantise.blocks import PackedBlocks, pack_blocks
from coattn.parts.maintenance.entries.lists import EntryLists
from coattn.types import LayerShape

LAYERS, SLOTS, HEADS, BLOCK, D = 2, 3, 2, 4, 8
SHAPE = LayerShape(4, HEADS, D, torch.float32, torch.device("cpu"))


class World:
    """Entries in plain memory, and lists of them beside what they should hold."""

    def __init__(self, most: int = 1 << 20, host: int | None = None, fixed: bool = True, packed: bool = False) -> None:
        self.ledger = Ledger(host=host)
        self.lists = EntryLists(SHAPE, LAYERS, SLOTS, BLOCK, 64, most, self.ledger, fixed, packed)
        self.memory = torch.randn(LAYERS, SLOTS, 40, HEADS, 2, BLOCK, D)
        if packed:
            self.memory = (self.memory > 0).float() * (255 / 256)  # numbers that 8 bits hold, whatever else there is
        self.source = pack_blocks(self.memory.flatten(0, 2)).view(LAYERS, SLOTS, 40, HEADS, -1)
        self.source = self.source if packed else self.memory
        self.want: dict[tuple[int, int, int], list[int]] = {}

    def address(self, layer: int, slot: int, block: int, head: int) -> int:
        return self.source[layer, slot, block, head].data_ptr()

    def put(self, mask: torch.Tensor) -> None:
        """mask `[layers, slots, heads, positions]`"""
        ids = torch.arange(self.source.shape[2], dtype=torch.int32)
        stride = self.address(0, 0, 1, 0) - self.address(0, 0, 0, 0)
        for a, b, c in itertools.product(range(LAYERS), range(SLOTS), range(HEADS)):
            own = mask[a, b, c].nonzero()[:, 0].int()
            source = self.address(a, b, 0, c)
            assert self.lists.fill(a, b, c, own, torch.rand(len(own)), ids, source, stride, alone=False) == len(own)
            self.want.setdefault((a, b, c), []).extend(own.tolist())

    def keep(self, slot: int, block: int, kept: torch.Tensor) -> None:
        """kept `[layers, heads, BLOCK]` of one block."""
        source = torch.tensor([[self.address(a, slot, block, h) for h in range(HEADS)] for a in range(LAYERS)])
        self.lists.keep(slot, block * BLOCK, kept, torch.rand(kept.shape), source).finish()
        for a, c, r in kept.nonzero().tolist():
            self.want.setdefault((a, slot, c), []).append(block * BLOCK + r)

    def check(self) -> None:
        lists = self.lists
        for layer in range(LAYERS):
            for slot in range(SLOTS):
                for head in range(HEADS):
                    want = self.want.get((layer, slot, head), [])
                    assert lists.positions(layer, slot, head).tolist() == want
                    ids = lists.table[layer, slot, head].long()
                    for i, position in enumerate(want):
                        own = self.read(ids[i // BLOCK])[head, :, i % BLOCK]
                        torch.testing.assert_close(
                            own, self.memory[layer, slot, position // BLOCK, head, :, position % BLOCK]
                        )
        owned = [i for key in self.want for i in self._ids(*key)]
        assert len(owned) == len(set(owned)) == lists.used_bytes() // lists.block_bytes

    def read(self, block: torch.Tensor) -> torch.Tensor:
        """`[kv_heads, 2, BLOCK, D]`, the same for every head."""
        blocks = self.lists.blocks
        return blocks.read(block[None], torch.float32)[0] if isinstance(blocks, PackedBlocks) else blocks[block]

    def _ids(self, layer: int, slot: int, head: int) -> list[int]:
        count = len(self.want[layer, slot, head])
        return self.lists.table[layer, slot, head, : -(-count // BLOCK)].tolist()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_lists_hold_what_was_put(fixed: bool, packed: bool) -> None:
    torch.manual_seed(0)
    world = World(fixed=fixed, packed=packed)
    world.put(torch.rand(LAYERS, SLOTS, HEADS, 100) < 0.3)
    world.check()
    for block in range(25, 40):
        for slot in (2, 0):
            world.keep(slot, block, torch.rand(LAYERS, HEADS, BLOCK) < 0.5)
    world.check()
    assert world.lists.shown.sum() == 0
    world.lists.show([0])
    assert torch.equal(world.lists.shown[:, 0], world.lists.stored[:, 0])
    assert world.lists.shown[:, 1:].sum() == 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_cut_keeps_what_came_before(packed: bool) -> None:
    torch.manual_seed(1)
    world = World(packed=packed)
    world.put(torch.rand(LAYERS, SLOTS, HEADS, 100) < 0.4)
    world.lists.cut([1], 37)
    world.want = {key: [p for p in own if key[1] != 1 or p < 37] for key, own in world.want.items()}
    world.check()
    world.keep(1, 30, torch.ones(LAYERS, HEADS, BLOCK).bool())
    world.check()
    world.lists.cut([0, 1, 2])
    assert world.lists.used_bytes() == 0
    world.lists.release()
    assert world.ledger.held["host"] == 0


def test_in_8_bits_a_last_block_is_replaced_when_nobody_reads_it() -> None:
    """What is shown stays where and as it is until `finish`, and no block is lost."""
    world = World(packed=True)
    lists = world.lists
    world.memory[:, 0, 0, :, 0], world.memory[:, 0, 1, :, 0] = 0, 255 / 256
    world.source[:] = pack_blocks(world.memory.flatten(0, 2)).view_as(world.source)
    one = torch.zeros(LAYERS, HEADS, BLOCK).bool()
    one[..., 0] = True
    world.keep(0, 0, one)
    lists.show([0])
    world.check()
    table, shown = lists.table.clone(), lists.shown.clone()
    before = world.read(table[0, 0, 0, 0].long()).clone()
    source = torch.tensor([[world.address(a, 0, 1, h) for h in range(HEADS)] for a in range(LAYERS)])
    keeping = lists.keep(0, BLOCK, one, torch.rand(one.shape), source)
    assert keeping.pending is not None
    time.sleep(0.05)  # by now it is done, and nobody has asked for it
    assert torch.equal(lists.table, table)
    assert torch.equal(lists.shown, shown)
    assert torch.equal(world.read(table[0, 0, 0, 0].long())[:, :, 0], before[:, :, 0])
    keeping.finish()
    assert (lists.table[:, 0, :, 0] != table[:, 0, :, 0]).all()
    for key in world.want:
        world.want[key].append(BLOCK)
    world.check()


def test_in_8_bits_lists_take_the_bytes_of_such_blocks() -> None:
    plain, packed = (World(packed=packed).lists.block_bytes for packed in (False, True))
    assert (plain, packed) == (2 * BLOCK * D * 4, 128)  # 64 codes, 8 channels' and 4 rows' scales: 112, and padding


def test_what_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    world = World(host=20 * 2 * BLOCK * D * 4)
    world.put(torch.ones(LAYERS, SLOTS, HEADS, 4) < 2)
    with pytest.raises(BudgetError, match="host_kv"):
        world.put(torch.ones(LAYERS, SLOTS, HEADS, 8) < 2)
    assert sum(map(len, world.want.values())) < 12 * LAYERS * SLOTS * HEADS
    world.check()


def test_memory_is_topped_up_a_little_at_a_time_and_within_the_budget() -> None:
    piece = 2 << 20
    world = World(most=16 * piece, host=6 * piece)
    world.lists.top_up()
    assert world.ledger.held["host"] == 0  # nobody has asked for any
    held = []
    for _ in range(4):
        unused = world.ledger.held["host"] // world.lists.block_bytes - world.lists._next
        world.lists._take(max(1, unused))
        held.append(world.ledger.held["host"] // piece)
        world.lists.top_up()
    assert held == [4, 4, 5, 6]
    assert world.ledger.held["host"] == 6 * piece


@pytest.mark.parametrize("packed", [False, True])
def test_one_list_is_filled_in_pieces_while_others_are_kept(packed: bool) -> None:
    """By a thread of its own: steps of others add to their lists at the same time."""
    world = World(packed=packed)
    kept = torch.rand(LAYERS, HEADS, 160) < 0.5
    ids = torch.randperm(40).to(torch.int32)
    failed: list[BaseException] = []

    def fill() -> None:
        try:
            for layer in range(LAYERS):
                for head in range(HEADS):
                    for piece in kept[layer, head].nonzero()[:, 0].int().split(3 * BLOCK):
                        first, second = world.address(layer, 1, 0, head), world.address(layer, 1, 1, head)
                        at = (piece, torch.rand(len(piece)), ids, first, second - first)
                        world.lists.fill(layer, 1, head, *at)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    for block in range(20):
        world.keep(0, block, torch.rand(LAYERS, HEADS, BLOCK) < 0.6)
    thread.join()
    assert not failed
    # a list's positions are those of the sequence, whose block b is block ids[b] of the memory
    source = world.source.clone()
    world.source[:, 1], world.memory[:, 1] = source[:, 1, ids.long()], world.memory[:, 1, ids.long()].clone()
    for a, c, p in kept.nonzero().tolist():
        world.want.setdefault((a, 1, c), []).append(p)
    world.check()


def test_a_list_that_is_full_refuses() -> None:
    world = World()
    position = torch.arange(64 * BLOCK + 1, dtype=torch.int32)
    lists, before = world.lists._lists(), world.lists.used_bytes()
    with pytest.raises(native.NativeError, match="is full"):
        native.fill_rows(lists, 0, position, torch.rand(len(position)), position, 0, 0, position, native.Pace(4))
    assert world.lists.used_bytes() == before
    assert int(world.lists.stored.sum()) == 0
