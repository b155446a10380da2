"""Every full block in DRAM; the newest blocks, the filling one among them, in GPU memory."""

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import runs
from coattn.cache.host import HostTier
from coattn.cache.layout.base import DenseHistory
from coattn.cache.layout.ring import BlockRing
from coattn.cache.observer import Filled
from coattn.cache.prompt_buffer import PromptKVBuffer
from coattn.cache.snapshot import Averages, Snapshot, blank_unused, copy_back, copy_to_host
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import TableMemory
from coattn.kernels.append import append, read_rows
from coattn.kernels.flush import flush_values
from coattn.types import Phase, Step, Tier
from coattn.units import ceil_div


class NewestBlocks(BlockRing):
    """A full block is written through to DRAM; in GPU memory it stays as long as the ring has it."""

    def __init__(
        self,
        block: int,
        spec: CacheSpec,
        window: int | None,
        sinks: int,
        host: HostTier,
        prompts: PromptKVBuffer,
    ) -> None:
        """prompts: of prompts that are read in chunks, what later chunks need; see `PromptKVBuffer`."""
        super().__init__(block, spec, window, sinks)
        self.host, self._prompts = host, prompts
        self.table: BlockTable = host.table
        self.unshared = self._unshared()

    def min_bytes(self) -> int:
        spec, memory = self.spec, self.host.memory
        blocks = 1 if spec.fixed else spec.seqs * ((spec.tokens or 0) // self.block)
        padding = memory.side.padding if memory.side is not None and blocks else 0
        return super().min_bytes() + (blocks + padding) * memory.side_bytes

    def open(self) -> None:
        super().open()
        self.host.open()

    def release(self) -> None:
        self._prompts.release()
        super().release()
        self.table.release()

    # steps

    def plan(self, step: Step) -> None:
        self.table.grow([(slot, n // self.block) for slot, n in zip(step.slots, step.lengths, strict=True)])
        if step.phase is Phase.DECODE:
            self._end_prompts(step)
        else:
            self._hold_prompts(step)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        filled = self._write_through(layer, k, v, step)
        super().append(layer, k, v, step)
        return filled

    def append_rows(self, layer: int, k: Tensor, v: Tensor, tables: TableMemory) -> None:
        names, memory = ("write_block", "write_offset", "flush_to"), self.memory[layer]
        block, offset, to = (tables.device_rows(name, len(k)) for name in names)
        if self.host.keys is None:
            append(memory, block, offset, k, v, self.host.memory.listed(layer), to)
        else:
            append(memory, block, offset, k, v)
            flush_values(memory, self.host.memory.values(layer), block, to)

    def commit(self, step: Step) -> None:
        for slot, length in zip(step.slots, step.lengths, strict=True):
            if slot not in step.more and slot in self._prompts.held:
                self._prompts.finish(slot, self.host.generations(slot, length // self.block))

    def give_back(self, slot: int, history: int) -> None:
        self.table.shrink(slot, history // self.block)

    def truncate(self, slot: int, length: int, keep: int) -> None:
        self._prompts.end(slot)
        self._bring_back(slot, length, keep)
        self.table.shrink(slot, keep // self.block)

    def history(self, layer: int, slot: int, length: int) -> DenseHistory | None:
        if slot in self._prompts.held:
            return DenseHistory(*self._prompts.read(layer, slot, length))
        return None if self._prompts.spare_room else DenseHistory(*self._read(layer, slot, 0, length))

    def midway(self, slot: int) -> bool:
        return self.host.keys is not None and slot in self._prompts.held

    def _write_through(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        """The filling block and the new tokens make a run that starts at a block: full ones go to DRAM."""
        filled = []
        for slot, history, (start, end) in zip(step.slots, step.history, step.spans, strict=True):
            first, old = divmod(history, self.block)
            full = (old + end - start) // self.block
            keys, values = new_k, new_v = k[start:end], v[start:end]
            if full:
                if old:
                    before = read_rows(self.memory[layer], *self._filling(slot, first, history, k.device))
                    keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
                keys, values = keys[: full * self.block], values[: full * self.block]
                ids = self.table.owned[slot][first : first + full]
                self.host.write(layer, ids, keys, values)
            held = slot in self._prompts.held
            if held and (slot in step.more or self.host.keys is None):
                self._prompts.write(layer, slot, history, new_k, new_v)
            if held and self.host.keys is not None:
                if slot not in step.more:
                    filled += self._all_filled(layer, slot, history, new_k, new_v)
            elif full:
                filled.append(Filled(slot, first, ids, keys, values))
        return filled

    def _filling(self, slot: int, first: int, history: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places of the tokens of a block that is not full; the same for every layer of a device."""
        positions = torch.arange(first * self.block, history)
        return self.once(("filling", slot, history, device), lambda: self.places_on(device, slot, positions))

    # prompts in chunks

    def _hold_prompts(self, step: Step) -> None:
        """Room for prompts that go on. What one of them follows is kept as far as it is known."""
        prompts = self._prompts
        for slot, start in prompts.plan(step, self.host.generations).items():
            length = step.history[step.slots.index(slot)]
            for layer in self.spec.layers:
                prompts.write(layer, slot, start, *self._read(layer, slot, start, length))

    def _end_prompts(self, step: Step) -> None:
        """Prompts that a decode step follows although more was to come: it takes their last token."""
        for slot, history in zip(step.slots, step.history, strict=True):
            if slot in self._prompts.held:
                for layer, s in self.spec.layers.items() if self.host.keys is not None else ():
                    none = torch.empty(0, s.kv_heads, s.head_dim, dtype=s.dtype, device=s.device)
                    filled = self._all_filled(layer, slot, history, none, none)
                    self.host.keys.update(layer, filled, None)  # type: ignore[union-attr]
                self._prompts.end(slot)

    def _all_filled(self, layer: int, slot: int, history: int, k: Tensor, v: Tensor) -> list[Filled]:
        """All blocks that a prompt has filled, with its last chunk k, v: what is made of them does not depend on how it
        was cut."""
        first, last = self._prompts.held[slot].known, (history + len(k)) // self.block
        if first == last:
            return []
        before = self._prompts.read(layer, slot, history)
        keys, values = (
            torch.cat(pair)[first * self.block : last * self.block] for pair in zip(before, (k, v), strict=True)
        )
        return [Filled(slot, first, self.table.owned[slot][first:last], keys, values)]

    def _read(self, layer: int, slot: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """k, v of the tokens from `start`, where a block begins, to `length`: out of the sinks, out of DRAM, out of the
        window. On their way when this returns."""
        block, device = self.block, self.spec.layers[layer].device
        cut = max(start, min(length, self.sinks * block))
        far = range(max(start // block, self.sinks), self.first(length))

        def places() -> tuple[Tensor, Tensor]:
            newest = torch.arange(max(cut, min(length, far.stop * block)), length)
            return self.places_on(device, slot, torch.cat([torch.arange(start, cut), newest]))

        near = read_rows(self.memory[layer], *self.once(("read", slot, start, length, device), places))
        if not far:
            return near
        there = self.host.read(layer, slot, far)
        k, v = (torch.cat([x[: cut - start], y, x[cut - start :]]) for x, y in zip(near, there, strict=True))
        return k, v

    # a sequence outside its slot

    def _unshared(self) -> str | None:
        if self.host.keys is not None:
            return "keys in DRAM are known by their codes alone, so what is read later depends on how a prompt was cut"
        if self.host.memory.form != "model":
            return "blocks in DRAM are rounded, so what is read later depends on how a prompt was cut"
        return None

    def take(self, slot: int, tokens: int, averages: Averages) -> Snapshot:
        snapshot = Snapshot(self.table.owned.get(slot, [])[: tokens // self.block])
        ids, window = self._ids(slot, self._copied(tokens)), self._ids(slot, self.newest(tokens))
        layers = list(self.spec.layers)
        if len(ids):
            for layer, x in copy_to_host(layers, self.memory, ids).items():
                snapshot.tensors[f"window.{layer}"] = blank_unused(x, tokens, self.block)
        if len(window):
            for layer, x in copy_to_host([i for i in layers if i in averages], averages, window).items():
                snapshot.tensors[f"averages.{layer}"] = blank_unused(x[..., None], tokens, self.block)[..., 0]
        return snapshot

    def put(self, slot: int, tokens: int, snapshot: Snapshot, averages: Averages) -> int:
        self.table.share(slot, snapshot.ids)
        copied, window = self._copied(tokens), self.newest(tokens)
        for name, memory, blocks in (("window", self.memory, copied), ("averages", averages, window)):
            tensors = {layer: snapshot.tensors.get(f"{name}.{layer}") for layer in self.spec.layers}
            own = {layer: x for layer, x in tensors.items() if x is not None and blocks}
            copy_back(memory, self._ids(slot, blocks), own)
        self._refill(slot, tokens, [b for b in window if b not in set(copied)])
        return len(window) * self.memory.block_bytes

    def shapes(self, tokens: int, entries: int, averages: Averages) -> tuple[int, dict[str, list[int]]]:
        wanted: dict[str, list[int]] = {}
        copied, newest = len(self._copied(tokens)), len(self.newest(tokens))
        for layer, s in self.spec.layers.items():
            if copied:
                wanted[f"window.{layer}"] = list(self.memory.size(copied, s))
            if layer in averages and newest:
                wanted[f"averages.{layer}"] = [newest, s.kv_heads, self.block]
        return tokens // self.block, wanted

    def snapshot_goes_back(self, snapshot: Snapshot) -> bool:
        """Not where codes are all that is left of its keys."""
        return self.host.keys is None

    def _copied(self, tokens: int) -> list[int]:
        """Of the window's blocks, those that DRAM does not have as they are: the one that is not full, or all."""
        blocks = self.newest(tokens)
        if self.unshared is not None:
            return blocks
        return blocks[-1:] if tokens % self.block else []

    def _ids(self, slot: int, blocks: list[int]) -> Tensor:
        return torch.tensor([self.block_id(slot, b) for b in blocks], dtype=torch.long)

    def _refill(self, slot: int, tokens: int, blocks: list[int]) -> None:
        """Blocks of the window as DRAM has them, out of spare GPU memory where pages are cached. tokens: of the
        sequence, whose full blocks are all in DRAM."""
        prompts, block = self._prompts, self.block
        known, cached = prompts.cached(self.host.generations(slot, tokens // block))
        for first, last in runs(blocks):
            start, end = blocks[first] * block, (blocks[last - 1] + 1) * block
            ids = [self.block_id(slot, b) for b in blocks[first:last]]
            for layer in self.spec.layers:
                if end <= known:
                    both = prompts.gather(cached, layer, start, end)
                else:
                    both = self.host.read(layer, slot, range(start // block, end // block))
                for i, rows in enumerate(both):
                    whole = rows.reshape(-1, block, *rows.shape[1:]).transpose(1, 2)
                    for here, after in runs(ids):
                        self.memory[layer][ids[here] : ids[after - 1] + 1, :, i] = whole[here:after]

    def _bring_back(self, slot: int, length: int, keep: int) -> None:
        """Blocks that had left the window and are among the newest again come back."""
        block = self.block
        last = min(ceil_div(keep, block), ceil_div(length, block) - self.ring)
        wanted = list(range(max(self.sinks, ceil_div(keep, block) - self.ring), last))
        if wanted:
            self._refill(slot, length, wanted)

    # bytes

    def bytes_for(self, tokens: int) -> dict[Tier, int]:
        blocks, side = tokens // self.block, self.host.memory.side_bytes
        needed: dict[Tier, int] = {"host": int(blocks * self.host.unit)}
        return needed | {"gpu": blocks * side} if side else needed

    def free_bytes(self) -> dict[Tier, int | None]:
        free, side = self.table.free(), self.host.memory.side_bytes
        left: dict[Tier, int | None] = {"host": None if free is None else int(free * self.host.unit)}
        return left | {"gpu": None if free is None else free * side} if side else left
