"""One case beside exact attention: a layer, a sequence and a KV head in one decode step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.kernels.quantise.blocks import unpack_blocks
from coattn.kernels.softcap import softcap as capped

PIECE = 4096
"""Tokens that are read at a time."""

Rows = Iterator[tuple[Tensor, Tensor]]
"""k, v `[n, heads, d]`, piece after piece, all of a sequence."""


@dataclass(frozen=True)
class Case:
    """What a decode step did for some KV heads of a sequence.

    q, out: `[heads, group, d]` float32. attended, left: `[heads, group]` float32: the lse of entries that were attended
    by their own keys, and what was estimated for the rest.
    """

    q: Tensor
    out: Tensor
    attended: Tensor
    left: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None = None
    """`[heads, group]` float32: not in `attended`."""


@dataclass(frozen=True)
class Finding:
    """`[heads]` float64 each, means over the query heads of a group."""

    error: Tensor
    """Of the output: how far it is from exact attention's, in units of how far that is from the values' mean; each the
    root of the mean square over the group."""
    missed: Tensor
    """True mass of entries that were not attended by their own keys."""
    estimated: Tensor
    """What the rule thought that mass to be."""


def measure(case: Case, rows: Rows) -> Finding:
    """Reads every row once."""
    heads, group, d = case.q.shape
    top, attended = case.q.new_full((heads, group), -torch.inf), case.attended.double()
    if case.sink_logits is not None:
        top, attended = case.sink_logits.clone(), torch.logaddexp(attended, case.sink_logits.double())
    total, acc = top.isfinite().float(), torch.zeros_like(case.q)
    count, sums = 0, torch.zeros(heads, d, dtype=torch.float64, device=top.device)
    for k, v in rows:
        keys, values = k.float().transpose(0, 1), v.float().transpose(0, 1)
        scores = capped(case.q @ keys.mT * case.scale, case.softcap)
        higher = torch.maximum(top, scores.amax(-1))
        weights, shrink = (scores - higher[..., None]).exp(), (top - higher).exp()
        total = total * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + weights @ values
        top = higher
        count += len(k)
        sums += values.sum(1)
    full = top.double() + total.double().log()
    exact, mean = acc.double() / total.double()[..., None], sums[:, None] / count
    if case.sink_logits is not None:  # what the sink takes is no entry's
        mean = mean * -(case.sink_logits - full).expm1()[..., None]
    added = (exact - mean).square().sum((1, 2)).clamp_min(1e-30)
    off = (case.out.double() - exact).square().sum((1, 2))
    missed = 1 - (attended - full).exp().clamp(max=1.0)
    known = torch.logaddexp(attended, case.left.double())
    estimated = (case.left.double() - known).exp()
    return Finding((off / added).sqrt(), missed.mean(1), estimated.mean(1))


def host_rows(memory: BlockMemory, layer: int, ids: Tensor, head: int) -> Rows:
    """k, v of one KV head out of listed blocks in DRAM."""
    shape, kept = memory.layers[layer], memory[layer]
    each = max(1, PIECE // memory.block)
    for some in torch.split(ids, each):
        rows = kept[some, head]
        if memory.form != "model":
            rows = unpack_blocks(rows, memory.block, shape.head_dim, torch.float32)
        both = rows.transpose(0, 1).reshape(2, -1, 1, shape.head_dim)
        yield both[0], both[1]
