"""Where the blocks of a sequence lie, and which a step attended to: what the host knows without asking a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.step.runtime import LayerGroup, Runtime
from coattn.units import ceil_div

GPU, HOST, GONE, SHARED = "ghxs"
"""In the GPU tier; in DRAM; forgotten; stored once for this sequence and others that run."""
CELLS = 1024
"""Most cells of a sequence: of a longer one, each stands for several blocks."""


class Seen:
    """Which blocks a decode step attended to in one layer, as far as its rule has left that in host memory."""

    def __init__(self, runtime: Runtime) -> None:
        self.group = runtime.groups[-1]
        layers = sorted(self.group.cache.spec.layers)
        self.layer = layers[len(layers) // 2]
        self.shares: dict[int, Tensor] = {}
        """By slot: float32 `[blocks]`, the share of KV heads that attended to each block."""

    def look(self, sequences: Sequence[tuple[int, int]]) -> None:
        """Between two steps, of `(slot, tokens)`: the window, and the blocks that were left to the CPU."""
        cache, picks = self.group.cache, getattr(self.group.select, "picks", None)
        lists = None if picks is None else picks.made.get(self.layer)
        self.shares = {}
        if lists is None or cache.host is None or lists.host.device.type != "cpu":
            return
        rows = {int(slot): row for row, slot in enumerate(cache.tables.host("seq").tolist())}
        for slot, tokens in sequences:
            if slot not in rows or not tokens:
                continue
            ids, count = lists.host[rows[slot]].long(), lists.host_lens[rows[slot]]
            blocks = ceil_div(tokens, cache.block)
            numbers = _numbers(cache.host.table, slot, blocks)
            listed = torch.arange(ids.shape[-1]) * cache.block < count[:, None]
            picked = numbers[ids.clamp(0, len(numbers) - 1)].where(listed, blocks)
            by_head = torch.zeros(len(ids), blocks + 1, dtype=torch.bool).scatter_(1, picked, True)[:, :-1]
            self.shares[slot] = (by_head | _is(lies(self.group, tokens), GPU)).float().mean(0)


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


def _numbers(table: BlockTable, slot: int, blocks: int) -> Tensor:
    """`[ids]`: by id, the number of the sequence's block that lies there; `blocks` where none does."""
    ids = table.rows[slot, : min(blocks, len(table.owned.get(slot, ())))].long()
    numbers = torch.full((int(ids.max()) + 1 if len(ids) else 1,), blocks, dtype=torch.long)
    numbers[ids] = torch.arange(len(ids))
    return numbers


def _is(where: str, letter: str) -> Tensor:
    return torch.frombuffer(bytearray(where.encode()), dtype=torch.uint8) == ord(letter)


def cells(group: LayerGroup, seen: Seen | None, slot: int, tokens: int) -> dict[str, Any]:
    """For JSON: a letter and a digit for each cell; see `docs/serving.md`."""
    where = _shared(group, slot, lies(group, tokens))
    per = max(1, ceil_div(len(where), CELLS))
    if group.select.is_exact() and GONE not in where:
        share, source = torch.ones(len(where)), "all"
    elif seen is not None and slot in seen.shares:
        share, source = seen.shares[slot], f"layer {seen.layer}"
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
