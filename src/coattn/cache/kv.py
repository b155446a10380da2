"""The KV cache: every token of a group of layers, where its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.cache.config import CacheConfig
from coattn.cache.cut import bring_back, close_up
from coattn.cache.dense import DenseHistory, dense_history, marks_of, read_all, read_from, window_marks
from coattn.cache.host import HostTier
from coattn.cache.layout import AllBlocks, KeptTokens, Layout, NewestBlocks, RecentTokens
from coattn.cache.leftover import Leftovers
from coattn.cache.observer import BlockObserver, Filled, KeySource
from coattn.cache.reading import Reading
from coattn.cache.scales import ScaleMemory
from coattn.cache.sinks import TurnedSinks
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import NO_BLOCK, TableMemory
from coattn.cache.values import ValueMemory
from coattn.kernels.append import append, write_rows
from coattn.kernels.flush import flush_values
from coattn.kernels.reference.append import read_rows
from coattn.kernels.upload import upload
from coattn.types import BlockList, Phase, Selection, Step, Tier
from coattn.units import ceil_div

T = TypeVar("T")


class KVCache:
    """Keeps the KV of a group of layers as a CacheConfig says.

    Life: `open` once; then per step `plan` (host decisions and allocation; refuses without changing anything),
    `append` per layer, `commit`. A decode step reads what `plan` wrote into `tables`.
    """

    tables: TableMemory

    def __init__(self, config: CacheConfig, spec: CacheSpec, index: BlockObserver) -> None:
        """index: follows the blocks; a KeySource where their keys are not in DRAM, which `config` says (`needs`)."""
        self.index, side = index, index.side(spec, config)
        self._followed = side is not None
        self.reading: Reading | None = None
        """Prompts whose later chunks need keys that the cache does not keep, or would fetch them from DRAM."""
        if config.host == "v":
            spec = replace(spec, prompt_token_bytes=spec.block_bytes(1))
            self.reading = Reading(spec, config.block)
        elif config.host == "kv" and spec.fixed and (spec.device.type == "cuda" or spec.ledger.limit("gpu")):
            # fixed: whatever sequences will need of the budget was taken at first
            self.reading = Reading(spec, config.block, spare_room=True)
        self.config, self.spec, self.block = config, spec, config.block
        self.host: HostTier | None = None
        self.turned: TurnedSinks | None = None
        given: Any = config
        if config.gpu == "all":
            self.gpu: Layout = AllBlocks(self.block, spec, side)
        elif config.gpu == "kept":
            self.gpu = KeptTokens(self.block, spec, side)
        elif config.gpu == "recent":
            if given.positions == "cache" and given.sinks:
                self.turned = TurnedSinks(spec, self.block, given.sinks)
            beside = 0 if self.turned is None else self.turned.bytes
            self.gpu = RecentTokens(self.block, spec, given.sinks, given.recent, beside)
            self.gpu.numbered = self.turned is not None
        else:
            sinks = getattr(given, "sink_blocks", spec.plan.sink_blocks)
            self.gpu = NewestBlocks(self.block, spec, given.window_blocks, sinks)
            what, dtype = "Keeping every token", given.host_dtype
            if config.host == "kv":
                scales = None
                if dtype != "model" and spec.plan.scales_on_gpu:
                    scales = ScaleMemory(spec.layers, self.block, spec.ledger)
                    if side is None:
                        side = scales
                    else:
                        side.side = scales
                memory = BlockMemory("host", spec.layers, self.block, spec.ledger, what, dtype, side)
                memory.scales = scales
            else:
                memory = ValueMemory(spec.layers, self.block, spec.ledger, "Keeping every value", dtype, side)
            self.host = HostTier(self.block, spec, memory)
        self._once: dict[object, object] = {}
        self.left = Leftovers()
        """What is still in the windows of slots that nobody has."""
        self._writing: set[int] = set()
        """Slots of steps that were planned and are not over: their windows are not what their tokens say."""

    def open(self) -> None:
        """Allocates what is fixed. Raises BudgetError naming the minimum."""
        self.gpu.open()
        if self.turned is not None:
            self.turned.open()
        if self.host is not None:
            self.host.open()
        self._table_memory()

    def plan(self, step: Step) -> None:
        """Makes room for the step's tokens, and writes a decode step's table. Raises BudgetError, changing nothing."""
        if self.host is not None:
            self.host.plan(step)
        self.gpu.plan(step)
        for slot in step.slots:
            self.left.take(slot)
        self._writing.update(step.slots)
        if step.phase is Phase.DECODE:
            self._write(step)
            self._end_readings(step)
        elif self.reading is not None and (step.more or self.reading.past or self.reading.held):
            self._hold(self.reading, step)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        """Stores packed k, v `[tokens, kv_heads, head_dim]` of a planned step.

        A decode step has one for each row of its table, and its kernels alone know which block is full now. Otherwise
        returns the blocks that are, where the index follows them.
        """
        if step.phase is Phase.DECODE:
            self._append_rows(layer, k, v)
            return []
        filled = self._flush(layer, k, v, step)
        source, ids, rows = self._cached(("places", k.device), lambda: self._places(step, k.device))
        if len(source) == len(k):
            write_rows(self.gpu.memory[layer], ids, rows, k, v)
        elif len(source):
            write_rows(self.gpu.memory[layer], ids, rows, k[source], v[source])
        if self.turned is not None:
            for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
                first = self.gpu.stored_tokens(slot, history)
                self.turned.keep(layer, slot, torch.arange(first, first + end - start), k[start:end])
        return filled or self._filled(layer, step)

    def visible(self, layer: int, step: Step) -> Selection:
        """The stored history of a step that is no decode step; the same for every layer of a device."""
        device = self.spec.layers[layer].device
        return self._cached(("visible", step, device), lambda: self._visible(step, device))

    def history(self, layer: int, slot: int, step: Step) -> DenseHistory | None:
        """The same of one sequence, where it must be attended position by position; None where it is a set."""
        device = self.spec.layers[layer].device

        def places() -> list[Tensor]:
            assert isinstance(self.gpu, RecentTokens)
            return [upload(x, device) for x in self.gpu.places(slot, self.gpu.stored(slot))]

        return dense_history(self, layer, slot, step, lambda: self._cached(("ring", slot, device), places))

    def read(self, layer: int, slot: int, blocks: range) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of full blocks of a sequence out of DRAM, on the layer's device."""
        assert self.host is not None, "there is no DRAM tier"
        memory, shape = self.host.memory, self.spec.layers[layer]
        memory.settle()
        wanted = self.host.table.owned.get(slot, [])[blocks.start : blocks.stop]
        ids = torch.tensor(wanted, dtype=torch.long)
        if self.config.host == "kv":
            both = memory.brought(layer, wanted)
            keys, values = both[:, :, 0], both[:, :, 1]
        else:
            keys = cast("KeySource", self.index).keys(layer, ids)
            values = memory.values(layer).read(ids, shape.dtype).to(shape.device)
        k, v = (x.transpose(1, 2).reshape(-1, shape.kv_heads, shape.head_dim) for x in (keys, values))
        return k, v

    def commit(self, step: Step) -> None:
        """The step is over: its tokens are history now."""
        if step.phase is not Phase.DECODE:  # a decode step may run in the middle of another one, and keeps nothing here
            self._once.clear()
        self.gpu.commit(step)
        self._writing.difference_update(step.slots)
        for slot, length in zip(step.slots, step.lengths, strict=True) if self.reading is not None else ():
            if slot not in step.more and slot in self.reading.held:  # type: ignore[union-attr]
                self.reading.over(slot, marks_of(self, slot, length // self.block))  # type: ignore[union-attr]
        if self.host is not None:
            self.host.memory.settle()

    def abort(self, step: Step, ran: bool) -> set[int]:
        """The step that was planned did not happen: what it was given goes back -> sequences that have lost tokens.

        ran: whether any layer of it did. Then chunks may have been written over what windows and rings had.
        """
        if step.phase is not Phase.DECODE:
            self._once.clear()
        if self.host is not None:
            self.host.memory.settle()
        torn = set()
        for slot, history, new in zip(step.slots, step.history, step.new, strict=True):
            if ran and step.phase is not Phase.DECODE and history and self.gpu.overwrites(slot, history, new):
                torn.add(slot)
            if self.host is not None:
                self.host.table.shrink(slot, history // self.block)
            self.gpu.give_back(slot, history)
        return torn

    def truncate(self, slot: int, length: int, keep: int) -> None:
        """Forgets all but the first `keep` of the `length` tokens of a sequence."""
        if self.reading is not None:
            self.reading.end(slot)
        if self.host is not None and not keep:
            whole = slot not in self._writing
            self.left.leave(slot, window_marks(self, slot, length) if whole else {})
            self._writing.discard(slot)
        if isinstance(self.gpu, RecentTokens):
            close_up(self, self.gpu, slot, length, keep)
            return
        if self.host is not None:
            bring_back(self, slot, length, keep)
            self.host.table.shrink(slot, keep // self.block)
        self.gpu.shrink(slot, keep)

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        """Bytes per tier that a sequence of so many tokens takes of what the sequences share."""
        if self.host is None:
            shared = isinstance(self.gpu, AllBlocks)
            return {"gpu": ceil_div(tokens, self.block) * self.gpu.memory.block_bytes} if shared else {}
        blocks, side = tokens // self.block, self.host.memory.side_bytes
        found: dict[Tier, int] = {"host": int(blocks * self.host.unit)}
        return found | {"gpu": blocks * side} if side else found

    def free_bytes(self) -> dict[Tier, int | None]:
        """Bytes per tier that sequences can still be given of it; None: no limit."""
        if self.host is None:
            if not isinstance(self.gpu, AllBlocks):
                return {}
            free = self.gpu.table.free()
            return {"gpu": None if free is None else free * self.gpu.memory.block_bytes}
        free, side = self.host.table.free(), self.host.memory.side_bytes
        found: dict[Tier, int | None] = {"host": None if free is None else int(free * self.host.unit)}
        return found | {"gpu": None if free is None else free * side} if side else found

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        if self.reading is not None:
            self.reading.release()
        self.gpu.release()
        if self.turned is not None:
            self.turned.release()
        if self.host is not None:
            self.host.release()

    # decode steps

    def _append_rows(self, layer: int, k: Tensor, v: Tensor) -> None:
        """One token a row of the running step; a block that is full now goes on to DRAM."""
        gpu, names, rows = self.gpu.memory[layer], ("write_block", "write_offset"), len(k)
        block, offset = (self.tables.device_rows(name, rows) for name in names)
        if self.host is None:
            append(gpu, block, offset, k, v)
            if self.turned is not None:
                self.turned.turn(layer, gpu, k, self.tables, self.gpu.dummy_block)
            return
        to = self.tables.device_rows("flush_to", rows)
        if self.config.host == "kv":
            append(gpu, block, offset, k, v, self.host.memory.listed(layer), to)
        else:
            append(gpu, block, offset, k, v)
            flush_values(gpu, self.host.memory.values(layer), block, to)

    def _table_memory(self) -> TableMemory:
        """Made anew where the sequences have outgrown it."""
        numbers = dict.fromkeys(("seq", "write_block", "write_offset", "gpu_lens"), 0)
        columns = {**numbers, "gpu_blocks": self._list_width()} | ({"position": 0} if self.gpu.numbered else {})
        if self.host is not None:
            columns |= {"flush_to": 0, "host_lens": 0, "host_blocks": self.host.table.rows.shape[1]}
        made = getattr(self, "tables", None)
        if made is None or made.columns != columns:
            self.tables = made = TableMemory(columns, self.spec.seqs, self.spec.device)
        return made

    def _list_width(self) -> int:
        """Blocks in GPU memory that a decode step may attend to, of one sequence."""
        return self.gpu.width + self.spec.plan.extra_listed_blocks

    def _write(self, step: Step) -> None:
        memory, gpu, block = self._table_memory(), self.gpu, self.block
        places, lens, flush, host = [], [], [], []
        for row, (slot, history, length) in enumerate(zip(step.slots, step.history, step.lengths, strict=True)):
            at = gpu.stored_tokens(slot, history)
            seen = at + 1
            places.append(gpu.place(slot, at))
            pool = gpu.pool(slot)
            lens.append(len(pool) * block + gpu.entries(slot, seen))
            memory.set_list(
                "gpu_blocks",
                row,
                (gpu.key(slot, seen), len(pool)),
                lambda s=slot, n=seen, p=pool: torch.cat([torch.tensor(p, dtype=torch.int32), gpu.list(s, n)]),  # type: ignore[misc]
            )
            if self.host is None:
                continue
            table, first = self.host.table, gpu.first(length)
            flush.append(table.owned[slot][length // block - 1] if length % block == 0 else NO_BLOCK)
            host.append((first - gpu.sinks) * block)
            if first > gpu.sinks:
                memory.set_list(
                    "host_blocks",
                    row,
                    (slot, table.version[slot]),
                    lambda s=slot, t=table: t.rows[s, gpu.sinks :],  # type: ignore[misc]
                )
        numbers = {
            "seq": step.slots,
            "write_block": [block for block, _ in places],
            "write_offset": [offset for _, offset in places],
            "gpu_lens": lens,
        }
        if self.gpu.numbered:
            numbers["position"] = step.history
        if self.host is not None:
            numbers |= {"flush_to": flush, "host_lens": host}
        padding = {"seq": self.spec.seqs, "write_block": gpu.dummy_block, "flush_to": NO_BLOCK}
        memory.write(numbers, padding)
        memory.upload()

    # steps with many tokens

    def _visible(self, step: Step, device: torch.device) -> Selection:
        gpu, host = [], []
        for slot, own, history in zip(step.slots, step.visible, step.history, strict=True):
            seen = self.gpu.stored_tokens(slot, history) + own - history
            blocks = ceil_div(self.gpu.entries(slot, seen), self.block)
            gpu.append((self.gpu.list(slot, seen)[:blocks], self.gpu.entries(slot, seen)))
            if self.host is not None:
                first = self.gpu.first(seen)
                ids = self.host.table.owned.get(slot, [])[self.gpu.sinks : first]
                host.append((torch.tensor(ids), (first - self.gpu.sinks) * self.block))
        return Selection.of(_block_list(gpu, device), _block_list(host, torch.device("cpu")))

    def _places(self, step: Step, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Which packed tokens stay in GPU memory, and the block and row of each."""
        sources, ids, rows = [], [], []
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            base = self.gpu.stored_tokens(slot, history)
            kept = self.gpu.kept(slot, base, base + end - start)
            address = self.gpu.places(slot, kept)
            sources.append(kept - base + start)
            ids.append(address[0])
            rows.append(address[1])
        source, block, row = (upload(torch.cat(x), device) for x in (sources, ids, rows))
        return source, block, row

    def _flush(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        """The filling block and the new tokens make a run that starts at a block: full ones go to DRAM."""
        if self.host is None:
            return []
        filled = []
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            first, old = divmod(history, self.block)
            full = (old + end - start) // self.block
            keys, values = new_k, new_v = k[start:end], v[start:end]
            if full:
                if old:
                    before = read_rows(self.gpu.memory[layer], *self._filling(slot, first, history, k.device))
                    keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
                keys, values = keys[: full * self.block], values[: full * self.block]
                ids = self.host.table.owned[slot][first : first + full]
                self.host.write(layer, ids, keys, values)
            held = self.reading is not None and slot in self.reading.held
            if held and (slot in step.more or self.config.host == "kv"):
                self.reading.write(layer, slot, history, new_k, new_v)  # type: ignore[union-attr]
            if held and self.config.host == "v":
                if slot not in step.more:
                    filled += self._read_through(layer, slot, history, new_k, new_v)
            elif full:
                filled.append(Filled(slot, first, ids, keys, values))
        return filled

    def _filling(self, slot: int, first: int, history: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places of the tokens of a block that is not full; the same for every layer of a device."""

        def build() -> tuple[Tensor, Tensor]:
            ids, rows = self.gpu.places(slot, torch.arange(first * self.block, history))
            return upload(ids, device), upload(rows, device)

        return self._cached(("filling", slot, history, device), build)

    def _hold(self, reading: Reading, step: Step) -> None:
        """Room for prompts that go on. What one of them follows is kept as far as it is known."""
        marks = partial(marks_of, self) if reading.spare_room else None
        for slot, start in reading.plan(step, marks).items():
            length = step.history[step.slots.index(slot)]
            if marks:
                for layer, k, v in read_from(self, slot, start, length):
                    reading.write(layer, slot, start, k, v)
                continue
            for layer in self.spec.layers:
                reading.write(layer, slot, start, *read_all(self, layer, slot, length))

    def _end_readings(self, step: Step) -> None:
        """Prompts that a decode step follows although more was to come: it takes their last token."""
        for slot, history in zip(step.slots, step.history, strict=True) if self.reading is not None else ():
            if slot in self.reading.held:  # type: ignore[union-attr]
                for layer, s in self.spec.layers.items() if self.config.host == "v" else ():
                    none = torch.empty(0, s.kv_heads, s.head_dim, dtype=s.dtype, device=s.device)
                    self.index.update(layer, self._read_through(layer, slot, history, none, none), None)
                self.reading.end(slot)  # type: ignore[union-attr]

    def _read_through(self, layer: int, slot: int, history: int, k: Tensor, v: Tensor) -> list[Filled]:
        """All blocks that a prompt has filled, with its last chunk k, v: what is made of them does not depend on how it
        was cut."""
        assert self.reading is not None
        assert self.host is not None
        first, last = self.reading.held[slot].known, (history + len(k)) // self.block
        if first == last:
            return []
        before = self.reading.read(layer, slot, history)
        keys, values = (
            torch.cat(pair)[first * self.block : last * self.block] for pair in zip(before, (k, v), strict=True)
        )
        return [Filled(slot, first, self.host.table.owned[slot][first:last], keys, values)]

    def _filled(self, layer: int, step: Step) -> list[Filled]:
        """The same where everything stays in GPU memory."""
        if not self._followed or not isinstance(self.gpu, AllBlocks):
            return []
        filled, memory = [], self.gpu.memory[layer]
        for slot, before, after in zip(step.slots, step.history, step.lengths, strict=True):
            first, last = before // self.block, after // self.block
            ids = self.gpu.table.owned[slot][first:last]
            if ids:
                places = partial(upload, ids, memory.device)
                blocks = memory[self._cached(("filled", slot, before, memory.device), places)]
                k, v = (blocks[:, :, i].transpose(1, 2).flatten(0, 1) for i in range(2))
                filled.append(Filled(slot, first, ids, k, v))
        return filled

    def _cached(self, key: object, build: Callable[[], T]) -> T:
        """`build()`, computed once per step."""
        if key not in self._once:
            self._once[key] = build()
        return cast("T", self._once[key])


def _block_list(parts: list[tuple[Tensor, int]], device: torch.device) -> BlockList | None:
    """Ids and entries of each sequence -> one list; None where nobody has any."""
    longest = max((tokens for _, tokens in parts), default=0)
    if not longest:
        return None
    width = max(len(ids) for ids, _ in parts)
    table = torch.zeros(len(parts), 1, width, dtype=torch.int32)
    for row, (ids, _) in enumerate(parts):
        table[row, 0, : len(ids)] = ids
    tokens = torch.tensor([[n] for _, n in parts], dtype=torch.int32)
    return BlockList(upload(table, device), upload(tokens, device), longest)
