"""Single cases beside exact attention: a layer, a sequence and a KV head in one decode step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.cache.blocks import BlockMemory
from coattn.kernels.attend import attend, reference
from coattn.kernels.quantise.blocks import unpack_blocks
from coattn.state import AttnState, Split
from coattn.types import BlockList


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


def with_mean(q: Tensor) -> Tensor:
    """q `[q_heads, d]` -> `[1, 2, q_heads, d]`: it, and zeros, to which attention is the mean of all values."""
    return torch.stack([q, torch.zeros_like(q)])[None]


def measure(case: Case, exact: AttnState) -> Finding:
    """exact: attention of `with_mean` of the case's queries over every key, out `[1, 2, heads * group, d]`."""
    shape = case.q.shape
    full, whole = exact.lse[0, 0].double().view(shape[:-1]), exact.out[0].double().view(2, *shape)
    true, mean, attended = whole[0], whole[1], case.attended.double()
    if case.sink_logits is not None:  # what the sink takes is no entry's
        sinks = case.sink_logits.double()
        attended, known = torch.logaddexp(attended, sinks), torch.logaddexp(full, sinks)
        share = (full - known).exp()[..., None]
        true, mean, full = true * share, mean * share, known
    added = (true - mean).square().sum((1, 2)).clamp_min(1e-30)
    off = (case.out.double() - true).square().sum((1, 2))
    missed = 1 - (attended - full).exp().clamp(max=1.0)
    estimated = (case.left.double() - torch.logaddexp(attended, case.left.double())).exp()
    return Finding((off / added).sqrt(), missed.mean(1), estimated.mean(1))


def attend_all(case: Case, k: Tensor, v: Tensor) -> AttnState:
    """What `measure` compares with, of keys and values `[n, heads, d]` alone."""
    blocks = torch.stack([k, v]).permute(2, 0, 1, 3)[None].float()  # one block of all tokens
    lists = torch.zeros(1, 1, 1, dtype=torch.int32, device=k.device)
    picked = BlockList(lists, torch.full_like(lists[0], len(k)), len(k))
    return reference(with_mean(case.q.flatten(0, 1)), blocks, picked, case.scale, case.softcap)


def attend_host(case: Case, memory: BlockMemory, layer: int, ids: Tensor, head: int) -> AttnState:
    """The same of one KV head of listed full blocks in DRAM. Reads each once."""
    shape, kept, tokens = memory.layers[layer], memory[layer], len(ids) * memory.block
    group, d = case.q.shape[1:]
    if memory.form != "model":
        kept = unpack_blocks(kept[ids, head], memory.block, d, torch.float32)[:, None]
        ids, head, heads = torch.arange(len(ids)), 0, 1
    else:
        heads = shape.kv_heads
    q, counts = case.q.new_zeros(heads, group, d), torch.zeros(1, heads, dtype=torch.int32)
    q[head], counts[0, head] = case.q[0], tokens
    table = ids.int().expand(1, heads, -1).contiguous()
    state = attend(with_mean(q.flatten(0, 1)), kept, BlockList(table, counts, tokens), case.scale, case.softcap)
    assert not isinstance(state, Split)
    own = slice(head * group, (head + 1) * group)
    return AttnState(state.out[:, :, own], state.lse[:, :, own])
