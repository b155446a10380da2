"""Rows at the ends of lists of int8 blocks, against the same in PyTorch: within half a step, and nothing clipped."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tests.native.conftest import attend, forced_isa
from torch import Tensor

from coattn import native
from coattn.kernels.quantise.blocks import Layout, pack_blocks, unpack_blocks
from coattn.native.core import extension

LISTS, WIDTH, BLOCKS = 5, 40, 800
FORESEE = 8


def up(x: Tensor) -> Tensor:
    """The nearest float16 that is not lower."""
    half = x.half()
    return torch.where(half.float() < x, torch.nextafter(half, torch.full_like(half, torch.inf)), half).float()


class Scales(NamedTuple):
    """Of a block's key channels."""

    low: Tensor
    step: Tensor

    @property
    def high(self) -> Tensor:
        return self.low + 255 * self.step

    @staticmethod
    def of(low: Tensor, high: Tensor) -> Scales:
        low = -up(-low)
        return Scales(low, up((high - low) / 255))

    def widened(self, low: Tensor, high: Tensor) -> Scales:
        out = (low < self.low - 0.5 * self.step) | (high > self.low + 255.5 * self.step)
        wide = Scales.of(torch.minimum(low, self.low), torch.maximum(high, self.high))
        return Scales(torch.where(out, wide.low, self.low), torch.where(out, wide.step, self.step))

    def rounded(self, keys: Tensor) -> Tensor:
        codes = ((keys - self.low) * torch.where(self.step > 0, 1 / self.step, 0)).round()
        assert ((codes > -1) & (codes < 257)).all(), "half a step outside at most"
        return self.low + self.step * codes.clamp(0, 255)


class Want:
    """A list in PyTorch: scales and keys of its blocks, and how far each key may be from the one that came."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.blocks: list[tuple[Scales, Tensor, Tensor]] = []
        self.came: list[Tensor] = []

    def add(self, k: Tensor) -> bool:
        """Whether the last block changes for it."""
        held, moved = len(self.came) % self.block, False
        self.came += list(k)
        if held:
            own, keys, far = self.blocks.pop()
            more, k = k[: self.block - held], k[self.block - held :]
            wide = own.widened(more.amin(0), more.amax(0))
            changed = (wide.low != own.low) | (wide.step != own.step)
            moved = bool(changed.any())
            keys = torch.cat([wide.rounded(keys), wide.rounded(more)])
            far = torch.cat([far + changed * wide.step / 2, (wide.step / 2).expand_as(more)])
            self.blocks.append((wide, keys, far))
        for part in k.split(self.block):
            if not len(part):
                continue
            own = Scales.of(part.amin(0), part.amax(0))
            if len(part) < self.block and self.blocks:
                own = self.blocks[-1][0]
                for before, _, _ in self.blocks[-2 : -FORESEE - 1 : -1]:
                    own = own.widened(before.low, before.high)
                own = own.widened(part.amin(0), part.amax(0))
            self.blocks.append((own, own.rounded(part), (own.step / 2).expand_as(part)))
        return moved


class World:
    """Lists in the extension's memory, and as they should be."""

    def __init__(self, block: int, d: int) -> None:
        self.block, self.d = block, d
        self.memory = torch.full((BLOCKS, Layout(block, d).bytes), 0xFF, dtype=torch.uint8)
        self.lists = native.Lists(
            torch.full((LISTS, WIDTH), -1, dtype=torch.int32),
            torch.zeros(LISTS, dtype=torch.int32),
            self.memory.data_ptr(),
            block,
            d,
            torch.full((BLOCKS, block), -1, dtype=torch.int32),
            torch.zeros(BLOCKS, block),
            head_size=d,
        )
        self.taken = 0
        self.want = [Want(block) for _ in range(LISTS)]
        self.values: list[list[Tensor]] = [[] for _ in range(LISTS)]
        self.entries: list[list[tuple[int, float]]] = [[] for _ in range(LISTS)]
        """Positions and weights; what was put has none."""

    def take(self, n: int) -> Tensor:
        self.taken += n
        return torch.arange(self.taken - n, self.taken, dtype=torch.int32)

    def keep(self, rows: Tensor, kept: Tensor, position: int = 0) -> Tensor:
        """rows `[LISTS, 2, block, d]`, kept `[LISTS, block]`: a block of each list. Whether its last block moved."""
        source = pack_blocks(rows[:, None])[:, 0].contiguous()
        where = torch.tensor([one.data_ptr() for one in source])
        spare, other = self.take(LISTS), self.take(LISTS)
        first = torch.full((LISTS,), position, dtype=torch.int32)
        weight = rows[:, 0, :, 0].contiguous()
        before = self.memory.clone(), self.lists.table.clone(), self.lists.stored.clone()
        done = native.plan_keep_rows(
            self.lists, torch.arange(LISTS), kept.to(torch.uint8), weight, where, first, spare, other
        ).run()
        self.unharmed(*before)
        moves = []
        for i, one in enumerate(unpack_blocks(source, self.block, self.d, torch.float32)):
            self.entries[i] += [(position + r, float(weight[i, r])) for r in kept[i].nonzero()[:, 0].tolist()]
            moves.append(self.expect(i, one[:, kept[i]]))
        assert (done.moved >= 0).tolist() == moves
        for i in done.moved.ge(0).nonzero()[:, 0].tolist():
            assert done.moved[i] == before[2][i] // self.block
            self.lists.table[i, done.moved[i]] = other[i]
        return done.moved >= 0

    def unharmed(self, memory: Tensor, table: Tensor, stored: Tensor) -> None:
        """What was listed before is as it was, for whoever reads it meanwhile."""
        for i in range(LISTS):
            count = int(stored[i])
            ids = table[i, : -(-count // self.block)].long()
            assert torch.equal(self.lists.table[i, : len(ids)].long(), ids)
            old, new = (unpack_blocks(m[ids], self.block, self.d, torch.float32) for m in (memory, self.memory))
            for a, b in zip(old.unbind(1), new.unbind(1), strict=True):
                assert torch.equal(a.flatten(0, 1)[:count], b.flatten(0, 1)[:count])

    def put(self, rows: list[Tensor]) -> None:
        """rows: `[2, n, d]` for each list."""
        sources, where, numbers = [], [], []
        counts = torch.tensor([one.shape[1] for one in rows])
        for i, one in enumerate(rows):
            n = one.shape[1]
            whole = torch.zeros(2, -(-n // self.block) * self.block, self.d)
            whole[:, :n] = one
            source = pack_blocks(whole.unflatten(1, (-1, self.block)).transpose(0, 1)[:, None])[:, 0].contiguous()
            sources.append(source)
            where += [source[r // self.block].data_ptr() for r in range(n)]
            numbers += [r % self.block for r in range(n)]
            stored = int(self.lists.stored[i])
            have, need = -(-stored // self.block), -(-(stored + n) // self.block)
            self.lists.table[i, have:need] = self.take(need - have)
            clear = unpack_blocks(source, self.block, self.d, torch.float32).transpose(0, 1).flatten(1, 2)[:, :n]
            self.expect(i, clear)
            self.entries[i] += [(-1, 0.0)] * n
        which, first = torch.arange(LISTS), torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        source, rows_of = torch.tensor(where, dtype=torch.int64), torch.tensor(numbers, dtype=torch.int32)
        job = extension.PutRowsJob()
        self.lists.fill(job)
        job.count, job.list, job.first = LISTS, which.data_ptr(), first.data_ptr()
        job.source, job.row = source.data_ptr(), rows_of.data_ptr()
        extension.put_rows(job)
        self.lists.stored.add_(counts)

    def expect(self, i: int, rows: Tensor) -> bool:
        self.values[i] += list(rows[1])
        return len(rows[0]) > 0 and self.want[i].add(rows[0])

    def check(self) -> None:
        for i, want in enumerate(self.want):
            n = len(want.came)
            assert int(self.lists.stored[i]) == n
            if not n:
                continue
            ids = self.lists.table[i, : -(-n // self.block)].long()
            noted = (self.lists.position, self.lists.weight)
            position, weight = (what[ids].flatten()[:n].tolist() for what in noted)
            assert list(zip(position, weight, strict=True)) == self.entries[i]
            got = unpack_blocks(self.memory[ids], self.block, self.d, torch.float32)
            keys, values = (part.flatten(0, 1)[:n] for part in got.unbind(1))
            torch.testing.assert_close(keys, torch.cat([own for _, own, _ in want.blocks]), atol=1e-6, rtol=1e-5)
            far = torch.cat([far for _, _, far in want.blocks])
            assert ((keys - torch.stack(want.came)).abs() <= far * (1 + 1e-4) + 1e-5).all()
            came = torch.stack(self.values[i])
            spread = came.amax(-1, keepdim=True) - came.amin(-1, keepdim=True)
            slack = came.abs().amax(-1, keepdim=True) * 2**-9 / 255 + 1e-6
            assert ((values - came).abs() <= spread * (1 + 2**-9) / 255 / 2 + slack).all()


def some(block: int, d: int) -> Tensor:
    """Channels of different sizes, which change as a sequence goes on."""
    rows = torch.randn(LISTS, 2, block, d)
    return rows * (1 + 5 * (torch.arange(d) % 16 == 3)) + torch.randn(LISTS, 2, 1, d)


@pytest.mark.parametrize(("block", "d"), [(32, 64), (8, 16), (5, 80), (1, 8)])
def test_many_appends_of_a_few_rows(isa: str, block: int, d: int) -> None:
    torch.manual_seed(block)
    world = World(block, d)
    moved = 0
    for number, share in enumerate((0.05, 0.3, 0.0, 1.0, *[0.2] * 20)):
        moved += int(world.keep(some(block, d), torch.rand(LISTS, block) < share, number * block).sum())
        world.check()
    assert moved > 0 or block == 1


def test_rows_put_all_at_once_and_rows_kept_after_them(isa: str) -> None:
    torch.manual_seed(1)
    world = World(8, 32)
    for counts in ((100, 0, 7, 8, 33), (0, 5, 1, 0, 9)):
        world.put([torch.randn(2, n, 32) * 3 for n in counts])
        world.check()
    for _ in range(5):
        world.keep(some(8, 32), torch.rand(LISTS, 8) < 0.4)
        world.check()


def test_a_row_within_the_scales_is_added_in_place_and_one_outside_is_not_clipped() -> None:
    world = World(8, 16)
    rows = torch.randn(LISTS, 2, 8, 16).clamp(-1, 1)
    rows[:, 0, 0], rows[:, 0, 1] = -1, 1
    first, third, last = (torch.zeros(LISTS, 8).bool() for _ in range(3))
    first[:, :2], third[:, 2], last[:, 3] = True, True, True
    assert not world.keep(rows, first).any()
    assert not world.keep(rows, third).any()
    far = rows.clone()
    far[:, 0, 3, 5] = 40.0
    assert world.keep(far, last).all()
    world.check()
    ids = world.lists.table[:, 0].long()
    got = unpack_blocks(world.memory[ids], 8, 16, torch.float32)[:, 0]
    assert (got[:, 3, 5] - 40).abs().max() < 0.1
    other = torch.arange(16) != 5
    assert (got[:, 0] + 1).abs()[:, other].max() < 0.01


def test_a_new_block_holds_what_the_blocks_before_hold() -> None:
    """So it takes rows that its own first rows did not let expect, and is not written anew for them."""
    torch.manual_seed(2)
    world = World(8, 16)
    world.put([torch.randn(2, 24, 16) for _ in range(LISTS)])
    one = torch.arange(8)[None].expand(LISTS, -1) == 0
    rows = torch.randn(LISTS, 2, 8, 16) * 0.1
    assert not world.keep(rows, one).any()
    assert not world.keep(rows * 5, one).any()
    world.check()


def test_rows_that_fill_a_block_at_once_have_its_own_scales() -> None:
    """The bytes are those of a list's first block: what came before them in the list is nothing to them."""
    torch.manual_seed(3)
    world = World(8, 16)
    world.put([100 * torch.randn(2, 8, 16) for _ in range(LISTS)])
    rows = torch.randn(LISTS, 2, 8, 16)
    world.keep(rows, torch.ones(LISTS, 8).bool())
    alone = World(8, 16)
    alone.keep(rows, torch.ones(LISTS, 8).bool())
    used = Layout(8, 16).scales + 4 * (8 + 16)
    later, first = world.memory[world.lists.table[:, 1].long()], alone.memory[alone.lists.table[:, 0].long()]
    assert torch.equal(later[:, :used], first[:, :used])


@pytest.mark.parametrize("threads", [2, 3])
def test_how_many_threads_write_makes_no_difference(threads: int) -> None:
    memories, before = [], native.threads()
    try:
        for count in (1, threads):
            native.set_threads(count)
            torch.manual_seed(4)
            world = World(8, 16)
            world.put([torch.randn(2, n, 16) for n in (100, 3, 40, 8, 77)])
            for _ in range(6):
                world.keep(some(8, 16), torch.rand(LISTS, 8) < 0.4)
            memories.append(world.memory)
    finally:
        native.set_threads(before)
    assert torch.equal(*memories)


def test_instruction_sets_write_the_same_lists(kv) -> None:  # type: ignore[no-untyped-def]
    memories = []
    for name in kv.usable:
        torch.manual_seed(5)
        world = World(32, 72)
        with forced_isa(name):
            for _ in range(6):
                world.keep(some(32, 72), torch.rand(LISTS, 32) < 0.3)
        memories.append(world.memory)
    assert all(torch.equal(memories[0], memory) for memory in memories)


def test_attention_over_lists_is_attention_over_their_rows(isa: str, kv) -> None:  # type: ignore[no-untyped-def]
    """Blocks that belong to whichever head lists them."""
    torch.manual_seed(6)
    world = World(32, 64)
    world.put([torch.randn(2, n, 64) for n in (100, 0, 7, 32, 45)])
    world.keep(some(32, 64), torch.rand(LISTS, 32) < 0.3)
    q = torch.randn(1, 4 * LISTS, 64)
    blocks = native.Blocks(world.memory, "int8", 32, LISTS, 64, single=True)
    table, tokens = world.lists.table[None].contiguous(), world.lists.stored[None].contiguous()
    done = attend(q, blocks, table, tokens)
    for i in range(LISTS):
        ids = table[0, i, : -(-int(tokens[0, i]) // 32)].long()
        own = unpack_blocks(world.memory[ids], 32, 64, torch.float32).transpose(0, 1).flatten(1, 2)
        k, v = own[:, : int(tokens[0, i]), None]
        exact, lse, _ = kv.attention(q[:, 4 * i : 4 * i + 4], k, v, torch.float64)
        torch.testing.assert_close(done.out[:, 4 * i : 4 * i + 4].double(), exact, atol=2e-3, rtol=0)
        torch.testing.assert_close(done.lse[:, 4 * i : 4 * i + 4].double(), lse, atol=2e-3, rtol=0)


def test_refusals() -> None:
    world = World(8, 16)
    rows = pack_blocks(torch.randn(LISTS, 1, 2, 8, 16))
    where = torch.tensor([one.data_ptr() for one in rows])
    one, ids = torch.ones(LISTS, 8), world.take(LISTS)
    first = torch.zeros(LISTS, dtype=torch.int32)
    with pytest.raises(native.NativeError, match="need other blocks"):
        native.plan_keep_rows(world.lists, torch.arange(LISTS), one.to(torch.uint8), one, where, first, ids)
    world.lists.stored[:] = 8 * WIDTH
    call = native.plan_keep_rows(world.lists, torch.arange(LISTS), one.to(torch.uint8), one, where, first, ids, ids)
    with pytest.raises(native.NativeError, match="is full"):
        call.run()
