"""Where the blocks of a sequence lie, and which a step attended to: what the host knows without asking a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.probe import Probe
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import BlockList, Selection
from coattn.units import ceil_div

GPU, HOST, GONE, SHARED = "ghxs"
"""In the GPU tier; in DRAM; forgotten; stored once for this sequence and others that run."""
CELLS = 1024
"""Most cells of a sequence: of a longer one, each stands for several blocks."""


class Seen(Probe):
    """Which blocks a decode step attended to in one layer: of the next step that is not captured after `wanted` is set,
    or, with `look`, what a captured one has left in host memory."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        layers = sorted(runtime.groups[-1].cache.spec.layers)
        self.layer = layers[len(layers) // 2]
        self.wanted = False
        self.found: dict[int, Tensor] = {}
        """By slot: float32 `[blocks]`, the share of KV heads that attended to each block."""

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        if not self.wanted or call.layer != self.layer:
            return
        self.wanted, step = False, call.step
        self.found = {
            slot: attended(group, call.layer, selection, row, step.seqs, slot, tokens).float().mean(0)
            for row, (slot, tokens) in enumerate(zip(step.slots, step.lengths, strict=True))
        }

    def look(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Between two captured steps, of `(slot, tokens)`: the window, and the blocks that were left to the CPU."""
        group = self.runtime.groups[-1]
        cache, picks = group.cache, getattr(group.select, "picks", None)
        lists = None if picks is None else picks.of(self.layer)
        self.found = {}
        if lists is None or cache.host is None or lists.host.device.type != "cpu":
            return
        rows = {int(slot): row for row, slot in enumerate(cache.tables.host("seq").tolist())}
        for slot, tokens in sequences:
            if slot in rows and tokens:
                found = torch.zeros(lists.host.shape[1], ceil_div(tokens, cache.block) + 1, dtype=torch.bool)
                listed = BlockList(lists.host, lists.host_lens, lists.host.shape[-1] * cache.block)
                numbers = _host_numbers(group, slot, tokens)
                _mark(found, listed, rows[slot], len(lists.host), cache.block, numbers)
                here = _is(lies(group, tokens), GPU)
                self.found[slot] = (found[:, :-1] | here).float().mean(0)


def lies(group: LayerGroup, tokens: int) -> str:
    """One letter for each block of a sequence of so many tokens."""
    layout, block = group.cache.gpu, group.cache.block
    blocks = ceil_div(tokens, block)
    config = group.cache.config
    if config.gpu == "all":
        return GPU * blocks
    if config.gpu == "recent":
        given: Any = layout
        first, newest = ceil_div(int(given.first_tokens), block), max(0, tokens - int(given.ring)) // block
        return (GPU * first + GONE * (newest - first))[:blocks].ljust(blocks, GPU)
    first = layout.first(tokens)
    return (GPU * layout.sinks + HOST * (first - layout.sinks))[:blocks].ljust(blocks, GPU)


def _shared(group: LayerGroup, slot: int, where: str) -> str:
    """`where` with the blocks that lie in one place for several sequences; a window is each sequence's own."""
    table = group.cache.gpu.table
    if table is None:
        return where
    count = table.shared(slot)
    own = HOST if table.memory.tier == "host" else GPU
    return where[:count].replace(own, SHARED) + where[count:]


def attended(
    group: LayerGroup, layer: int, selection: Selection, row: int, rows: int, slot: int, tokens: int
) -> Tensor:
    """bool `[kv_heads, blocks]`: what row `row` of a step of `rows` sequences attended to, but for lists on a GPU."""
    cache = group.cache
    blocks = ceil_div(tokens, cache.block)
    heads = cache.spec.layers[layer].kv_heads
    found = torch.zeros(heads, blocks + 1, dtype=torch.bool)
    if cache.config.gpu == "recent":
        return (~_is(lies(group, tokens), GONE)).expand(heads, -1)
    near, far = selection.gpu, selection.host
    if near is not None:
        _mark(found, near, row, rows, cache.block, _gpu_numbers(group, layer, slot, tokens))
    if far is not None and far.memory is None:
        _mark(found, far, row, rows, cache.block, _host_numbers(group, slot, tokens))
    elif far is not None:
        _mark_entries(found, group, layer, slot)
    work = selection.rows
    if work is not None and work.index.device.type == "cpu":
        used = torch.arange(work.index.shape[-1]) < work.count[row, :, None]
        number = (work.index[row].long() + cache.gpu.sinks * cache.block) // cache.block
        found.scatter_(1, number.clamp(max=blocks).where(used, blocks), True)
    return found[:, :-1]


def _mark(found: Tensor, listed: BlockList, row: int, rows: int, block: int, numbers: Tensor) -> None:
    """numbers `[kv_heads or 1, ids]`: the sequence's block at each id. The last column of `found` stands for none."""
    near = listed.in_reach(rows)
    if near.table.device.type != "cpu":
        return
    table, count = near.table[row].long(), near.tokens[row]
    used = torch.arange(table.shape[-1]) * block < count[:, None]
    heads, none = len(found), found.shape[1] - 1
    ids = table.clamp(0, numbers.shape[-1] - 1).expand(heads, -1)
    there = numbers.expand(heads, -1).gather(1, ids).where(used.expand(heads, -1), none)
    found.scatter_(1, there.clamp(0, none), True)


def _mark_entries(found: Tensor, group: LayerGroup, layer: int, slot: int) -> None:
    """Single entries that a part keeps in DRAM by head."""
    maintenance: Any = group.maintenance
    if hasattr(maintenance, "lists"):
        number, kept = maintenance.numbers[layer], maintenance.lists
        for head, row in enumerate(found):
            row[(kept.positions(number, slot, head).long() // group.cache.block).clamp(max=len(row) - 1)] = True


def _host_numbers(group: LayerGroup, slot: int, tokens: int) -> Tensor:
    assert group.cache.host is not None
    return _inverse(group.cache.host.table, slot, ceil_div(tokens, group.cache.block))


def _gpu_numbers(group: LayerGroup, layer: int, slot: int, tokens: int) -> Tensor:
    layout: Any = group.cache.gpu
    none = ceil_div(tokens, group.cache.block)
    if group.cache.config.gpu == "all":
        return _inverse(layout.table, slot, none)
    first = layout.first(tokens)
    ids = layout.block_list(slot, tokens).tolist()
    known = dict(zip(ids, [*range(layout.sinks), *range(first, first + layout.ring)], strict=True))
    residency = group.maintenance.residency
    found = torch.full((1, max(known) + 1), none, dtype=torch.long)
    found[0, list(known)] = torch.tensor([min(number, none) for number in known.values()])
    if residency is None or residency.held[layer].device.type != "cpu":
        return found
    held = residency.held[layer][slot]
    start = residency.first + slot * residency.places
    wide = torch.full((len(held), start + residency.places), none, dtype=torch.long)
    wide[:, : found.shape[1]] = found
    wide[:, start:] = held.long().where(held >= 0, none)
    return wide


def _inverse(table: BlockTable, slot: int, none: int) -> Tensor:
    """`[1, ids]`: by id, the number of the sequence's block that lies there."""
    ids = table.rows[slot, : min(none, len(table.owned.get(slot, ())))].long()
    found = torch.full((1, int(ids.max()) + 1 if len(ids) else 1), none, dtype=torch.long)
    found[0, ids] = torch.arange(len(ids))
    return found


def _is(where: str, letter: str) -> Tensor:
    return torch.frombuffer(bytearray(where.encode()), dtype=torch.uint8) == ord(letter)


def cells(group: LayerGroup, seen: Seen | None, slot: int, tokens: int) -> dict[str, Any]:
    """For JSON: a letter and a digit for each cell; see `docs/serving.md`."""
    where = _shared(group, slot, lies(group, tokens))
    per = max(1, ceil_div(len(where), CELLS))
    share = None if seen is None else seen.found.get(slot)
    if group.select.is_exact() and GONE not in where:
        share, source = torch.ones(len(where)), "all"
    elif share is not None:
        source = f"layer {seen.layer}" if seen is not None else ""
    else:
        share, source = _is(lies(group, tokens), GPU).float(), "window"
    padded = torch.zeros(ceil_div(len(where), per) * per)
    known = share[: len(where)]
    padded[: len(known)] = known
    digits = (padded.view(-1, per).amax(1) * 9).ceil().int().tolist() if len(where) else []
    return {
        "block": group.cache.block,
        "per": per,
        "where": where[::per],
        "attended": "".join(map(str, digits)),
        "attended_from": source,
    }
