"""How much the queries of a prompt weigh what is stored, and which entries are chosen by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coattn.ops.reference.append import read_rows
from coattn.quantise.blocks import is_packed, unpack_blocks
from coattn.store.blocks import runs
from coattn.store.contextual.lists import Chosen
from coattn.types import LayerShape

if TYPE_CHECKING:
    from coattn.store.contextual.store import Contextual

PIECE = 256
"""Blocks that are brought to the layer's device at a time."""


class Weighing(NamedTuple):
    """How the weights of many queries and of the query heads of a KV head become one: the largest, or the mean."""

    peak: bool
    group_mean: bool


class Averages:
    """Each near entry's average weight, float32, on its layer's device."""

    def __init__(self, layers: Mapping[int, LayerShape], blocks: int, block: int) -> None:
        self.blocks = blocks
        self._order: dict[torch.device, list[int]] = {}
        for layer, shape in layers.items():
            self._order.setdefault(shape.device, []).append(layer)
        heads = next(iter(layers.values())).kv_heads
        self._values = {
            device: torch.zeros(len(own), blocks, heads, block, device=device) for device, own in self._order.items()
        }
        self._by_layer = {
            layer: self._values[device][i] for device, own in self._order.items() for i, layer in enumerate(own)
        }

    def __getitem__(self, layer: int) -> Tensor:
        """`[blocks, kv_heads, block]`"""
        return self._by_layer[layer]

    def copy(self, block: int) -> list[Tensor]:
        """A block's averages as they are now, where they lie; waits for nothing."""
        return [values[:, block].clone() for values in self._values.values()]

    def gathered(self, copies: list[Tensor]) -> Tensor:
        """`[layers, kv_heads, block]` on the host, layers in their order, of what `copy` returned."""
        if len(copies) == 1:
            return copies[0].cpu()
        found = torch.cat([part.cpu() for part in copies])
        there = {layer: i for i, layer in enumerate(layer for own in self._order.values() for layer in own)}
        return found[[there[layer] for layer in sorted(there)]]


def weights_over(
    q: Tensor, keys: Tensor, scale: float, softcap: float | None, how: Weighing, hidden: Tensor | None = None
) -> Tensor:
    """Softmax of q `[queries, q_heads, d]` over keys `[kv_heads, n, d]` -> `[kv_heads, n]`.

    hidden: `[queries, n]`, what a query may not see. Cost: `queries * group * n` scores of one KV head at a time.
    """
    found = []
    grouped = (
        q.float().view(len(q), keys.shape[0], -1, q.shape[-1]).permute(1, 2, 0, 3)
    )  # [kv_heads, group, queries, d]
    for own, rows in zip(grouped, keys, strict=True):
        scores = own * scale @ rows.float().T  # [group, queries, n]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        weights = weights.amax(1) if how.peak else weights.mean(1)
        found.append(weights.mean(0) if how.group_mean else weights.amax(0))
    return torch.stack(found)


def weigh_far(store: Contextual, layer: int, slot: int, blocks: int, q: Tensor | None, scale: float) -> Tensor:
    """`[kv_heads, entries]` on the host: the weights of q over the first far blocks of a sequence; of nobody, zero."""
    shape = store.opening.layers[layer]
    if q is None:
        return torch.zeros(shape.kv_heads, blocks * store.block)
    ids, memory = store.table.owned[slot][:blocks], store.far[layer]
    d = shape.head_dim
    pieces = []
    for start, end in runs(ids):
        for at in range(ids[start], ids[end - 1] + 1, PIECE):
            piece = memory[at : min(at + PIECE, ids[end - 1] + 1)].to(shape.device, non_blocking=True)
            piece = unpack_blocks(piece, store.block, d, shape.dtype) if is_packed(memory) else piece
            pieces.append(piece[:, :, 0].transpose(0, 1).flatten(1, 2))  # [kv_heads, n, d]
    return weights_over(q, torch.cat(pieces, 1), scale, shape.softcap, Weighing(store.peak, store.group_mean)).cpu()


def weigh_near(store: Contextual, layer: int, slot: int, length: int, q: Tensor, scale: float) -> None:
    """The averages of the window's entries start with the weights of q, the queries of the last tokens."""
    shape, first = store.opening.layers[layer], store._first_near(length) * store.block
    position = torch.arange(first, length)
    ids = torch.tensor([store._near_id(slot, b) for b in range(first // store.block, -(-length // store.block))])
    near, rows = ids[(position - first) // store.block].to(shape.device), (position % store.block).to(shape.device)
    q = q[-(length - first) :]  # a query before the window would see nothing of it
    keys, _ = read_rows(store.window[layer], near, rows)
    asking = torch.arange(length - len(q), length)[:, None]
    hidden = (position > asking).to(shape.device)
    weights = weights_over(q, keys.transpose(0, 1), scale, shape.softcap, Weighing(False, store.group_mean), hidden)
    store.averages[layer][near, :, rows] = weights.T


def choose_all(store: Contextual, layer: int, slot: int, weights: Tensor, kept: Tensor) -> Chosen:
    """The kept of a layer's far entries `[kv_heads, entries]` of one sequence."""
    head, position = kept.nonzero(as_tuple=True)
    ids = torch.tensor(store.table.owned[slot])[position // store.block]
    number = torch.full_like(head, store.numbers[layer])
    return Chosen(
        number,
        torch.full_like(head, slot),
        head,
        position,
        weights[head, position],
        _address(store, number, ids, head, position % store.block),
    )


def addresses(store: Contextual, far: list[int]) -> Tensor:
    """`[layers, len(far), kv_heads]`: where the keys of far blocks begin."""
    layers, heads = len(store.numbers), next(iter(store.opening.layers.values())).kv_heads
    number = torch.arange(layers)[:, None, None]
    ids, head = torch.tensor(far)[:, None], torch.arange(heads)
    return _address(store, number, ids, head, torch.zeros(1, dtype=torch.int64))


def _address(store: Contextual, number: Tensor, ids: Tensor, head: Tensor, row: Tensor) -> Tensor:
    """Addresses of the key rows of far entries; of blocks in 8 bits, of the blocks."""
    base = torch.tensor([store.far[layer].data_ptr() for layer in store.opening.layers])
    memory = store.far[next(iter(store.opening.layers))]
    size = memory.element_size()
    block, one = (memory.stride(i) * size for i in (0, 1))
    starts = base[number] + ids * block + head * one
    return starts + row * 0 if is_packed(memory) else starts + row * memory.stride(3) * size
