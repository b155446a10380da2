"""The KV cache: every token of a group of layers, where its configuration says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.host import HostTier, host_blocks
from coattn.cache.layout.all_blocks import AllBlocks
from coattn.cache.layout.base import Layout
from coattn.cache.layout.kept import KeptTokens
from coattn.cache.layout.newest import NewestBlocks
from coattn.cache.layout.recent import RecentTokens
from coattn.cache.observer import BlockObserver, Filled, KeySource
from coattn.cache.prompt_buffer import PromptKVBuffer
from coattn.cache.sinks import TurnedSinks
from coattn.cache.spec import CacheSpec
from coattn.cache.step_table import NO_BLOCK, TableMemory
from coattn.kernels.upload import upload
from coattn.types import BlockList, Phase, Selection, Step
from coattn.units import ceil_div


class KVCache:
    """Keeps the KV of a group of layers as a CacheConfig says.

    Life: `open` once; then per step `plan` (host decisions and allocation; refuses without changing anything),
    `append` per layer, `commit`. A decode step reads what `plan` wrote into `tables`.
    """

    tables: TableMemory

    def __init__(self, config: CacheConfig, spec: CacheSpec, index: BlockObserver) -> None:
        """index: follows the blocks; a KeySource where their keys are not in DRAM, which `config` says (`needs`)."""
        side = index.side(spec, config)
        self.prompts: PromptKVBuffer | None = None
        """With a DRAM tier: prompts whose later chunks need keys that it does not keep, or would fetch from there."""
        if config.host == "v":
            spec = replace(spec, prompt_token_bytes=spec.block_bytes(1))
            self.prompts = PromptKVBuffer(spec, config.block)
        elif config.host == "kv":
            # fixed: whatever sequences will need of the budget was taken at first
            spare = spec.fixed and bool(spec.device.type == "cuda" or spec.ledger.limit("gpu"))
            self.prompts = PromptKVBuffer(spec, config.block, spare_room=True, used=spare)
        self.config, self.spec, self.block = config, spec, config.block
        self.host: HostTier | None = None
        self.gpu: Layout
        given: Any = config
        if config.gpu == "all":
            self.gpu = AllBlocks(self.block, spec, side, given.gpu_dtype)
        elif config.gpu == "kept":
            self.gpu = KeptTokens(self.block, spec, side)
        elif config.gpu == "recent":
            counted = given.positions == "cache" and given.sinks > 0
            turned = TurnedSinks(spec, self.block, given.sinks, counted)
            self.gpu = RecentTokens(self.block, spec, given.sinks, given.recent, turned)
        else:
            sinks = getattr(given, "sink_blocks", spec.plan.sink_blocks)
            keys = cast("KeySource", index) if config.host == "v" else None
            self.host = HostTier(self.block, spec, host_blocks(given, spec, side), keys)
            assert self.prompts is not None
            self.gpu = NewestBlocks(self.block, spec, given.window_blocks, sinks, self.host, self.prompts)

    def open(self) -> None:
        """Allocates what is fixed. Raises BudgetError naming the minimum."""
        self.gpu.open()
        self._table_memory()

    @property
    def dram(self) -> HostTier:
        """The DRAM tier, for parts that need a cache that has one."""
        assert self.host is not None, "there is no DRAM tier"
        return self.host

    def plan(self, step: Step) -> None:
        """Makes room for the step's tokens, and writes a decode step's table. Raises BudgetError, changing nothing."""
        self.gpu.plan(step)
        if step.phase is Phase.DECODE:
            self._write(step)

    def append(self, layer: int, k: Tensor, v: Tensor, step: Step) -> list[Filled]:
        """Stores packed k, v `[tokens, kv_heads, head_dim]` of a planned step.

        A decode step has one for each row of its table, and its kernels alone know which block is full now. Otherwise
        returns the blocks that are, where the index follows them.
        """
        if step.phase is Phase.DECODE:
            self.gpu.append_rows(layer, k, v, self.tables)
            return []
        return self.gpu.append(layer, k, v, step)

    def visible(self, layer: int, step: Step) -> Selection:
        """The stored history of a step that is no decode step; the same for every layer of a device."""
        device = self.spec.layers[layer].device
        return self.gpu.once(("visible", step, device), lambda: self._visible(step, device))

    def read(self, layer: int, slot: int, blocks: range) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of full blocks of a sequence out of DRAM, on the layer's device."""
        return self.dram.read(layer, slot, blocks)

    def commit(self, step: Step) -> None:
        if step.phase is not Phase.DECODE:  # a decode step may run in the middle of another one, and keeps nothing here
            self.gpu.end_step()
        self.gpu.commit(step)
        if self.host is not None:
            self.host.memory.wait_writes()

    def abort(self, step: Step, ran: bool) -> set[int]:
        """The step that was planned did not happen: what it was given goes back -> sequences that have lost tokens.

        ran: whether any layer of it did. Then chunks may have been written over what windows and rings had.
        """
        if step.phase is not Phase.DECODE:
            self.gpu.end_step()
        if self.host is not None:
            self.host.memory.wait_writes()
        torn = set()
        for slot, history, new in zip(step.slots, step.history, step.new, strict=True):
            if ran and step.phase is not Phase.DECODE and history and self.gpu.overwrites(slot, history, new):
                torn.add(slot)
            self.gpu.give_back(slot, history)
        return torn

    # decode steps

    def _table_memory(self) -> TableMemory:
        """Made anew where the sequences have outgrown it."""
        numbers = dict.fromkeys(("seq", "write_block", "write_offset", "gpu_lens"), 0)
        extra = self.spec.plan.extra_listed_blocks
        columns = {**numbers, "gpu_blocks": self.gpu.width + extra} | ({"position": 0} if self.gpu.numbered else {})
        if self.host is not None:
            columns |= {"flush_to": 0, "host_lens": 0, "host_blocks": self.host.table.rows.shape[1]}
        made = getattr(self, "tables", None)
        if made is None or made.columns != columns:
            self.tables = made = TableMemory(columns, self.spec.seqs, self.spec.device)
        return made

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
                lambda s=slot, n=seen, p=pool: torch.cat([torch.tensor(p, dtype=torch.int32), gpu.block_list(s, n)]),  # type: ignore[misc]
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
                    (slot, table.list_version[slot]),
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
            gpu.append((self.gpu.block_list(slot, seen)[:blocks], self.gpu.entries(slot, seen)))
            if self.host is not None:
                first = self.gpu.first(seen)
                ids = self.host.table.owned.get(slot, [])[self.gpu.sinks : first]
                host.append((torch.tensor(ids), (first - self.gpu.sinks) * self.block))
        return Selection.of(_block_list(gpu, device), _block_list(host, torch.device("cpu")))


def _block_list(parts: Sequence[tuple[Tensor, int]], device: torch.device) -> BlockList | None:
    """Ids and entries of each sequence -> one list; None where no sequence has any."""
    longest = max((tokens for _, tokens in parts), default=0)
    if not longest:
        return None
    width = max(len(ids) for ids, _ in parts)
    table = torch.zeros(len(parts), 1, width, dtype=torch.int32)
    for row, (ids, _) in enumerate(parts):
        table[row, 0, : len(ids)] = ids
    tokens = torch.tensor([[n] for _, n in parts], dtype=torch.int32)
    return BlockList(upload(table, device), upload(tokens, device), longest)
