"""The CPU, over what lies in DRAM: blocks of keys and values, or values of entries whose weights are known."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.spec import CacheSpec
from coattn.kernels import flash
from coattn.kernels.attend import attend
from coattn.kernels.native import attend as native
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.weighted_sum import weighted_sum
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Executor, State
from coattn.parts.executor.pull import Pull
from coattn.state import AttnState
from coattn.types import BlockList, BlockWork, RowWork, Step, Work


@dataclass
class Cpu(Executor):
    """Computes where the KV lies: the query, or indices and weights, go to the host; a state comes back."""

    name = "cpu"
    runs = frozenset({"host", "rows"})
    provides = frozenset({"cpu"})
    asynchronous = True

    _reader: Pull | None = field(init=False, repr=False, default=None)
    """So many queries as a prompt has are a GPU's business wherever the keys lie: reading them once is less work."""
    _taken: dict[int, float] = field(init=False, repr=False, default_factory=dict)
    """By layer: single entries that the last step attended to, over its sequences; the mean over KV heads."""

    def open(self, cache: KVCache) -> None:
        super().open(cache)
        if cache.config.host == "kv" and cache.spec.device.type == "cuda":
            self._reader = Pull()
            self._reader.open(cache)

    def min_gpu_bytes(self, spec: CacheSpec, config: CacheConfig) -> int:
        return Pull().min_gpu_bytes(spec, config) if config.host == "kv" and spec.device.type == "cuda" else 0

    def run(self, call: AttentionCall, work: BlockWork | RowWork) -> State:
        if isinstance(work, RowWork):
            own = to_host(work)
            self._taken[call.layer] = float(own.count.sum()) / own.count.shape[1]
            return self._sum(call, own)
        q, blocks, listed = call.q.cpu(), self.blocks(call, work.blocks), work.blocks.in_reach(len(call.q))
        listed = replace(listed, longest=min(listed.longest, int(listed.tokens.max())))
        if isinstance(blocks, PackedBlocks) and (q.shape[1] >= flash.MANY or native.refuses(q, blocks) is not None):
            blocks, listed = unpacked(blocks, listed, call.shape.dtype)
        many = isinstance(blocks, Tensor) and flash.refuses(q, blocks, listed, call.shape.softcap) is None
        if not many and native.refuses(q, blocks) is None:
            state: State = native.attend_in_time(q, blocks, listed, call.scale, call.shape.softcap)
        else:
            assert isinstance(blocks, Tensor)
            state = attend(q, blocks, listed, call.scale, call.shape.softcap)
        return AttnState(state.out.to(call.q.device), state.lse.to(call.q.device))

    def read(self, call: AttentionCall, work: Work, following: int | None) -> State:
        if self._reader is None or isinstance(work, RowWork):
            return super().read(call, work, following)
        return self._reader.read(call, work, following)

    def blocks(self, call: AttentionCall, listed: BlockList) -> Tensor | PackedBlocks:
        """The memory that a list is of."""
        if listed.memory is None:
            return self.cache.dram.memory.listed(call.layer)
        return cast("Tensor | PackedBlocks", listed.memory)

    def report(self, step: Step) -> dict[str, Any]:
        return {"row_entries": sum(self._taken.values()) / len(self._taken)} if self._taken else {}

    def release(self) -> None:
        if self._reader is not None:
            self._reader.release()
            self._reader = None

    def _sum(self, call: AttentionCall, work: RowWork) -> AttnState:
        values = self.cache.dram.memory.values(call.layer)
        out = weighted_sum(work.weights, work.index, work.count, values, work.table)
        return AttnState(out[:, None].to(call.q.device), work.lse[:, None].to(call.q.device))


def unpacked(blocks: PackedBlocks, listed: BlockList, dtype: torch.dtype) -> tuple[Tensor, BlockList]:
    """The listed blocks alone, in a model's numbers, and the same list over them."""
    ids, places = torch.unique(listed.table, return_inverse=True)
    return blocks.read(ids.long(), dtype), replace(listed, table=places.to(torch.int32))


def to_host(work: RowWork) -> RowWork:
    """The lists in host memory, as wide as the longest. Waits for a GPU that made them."""
    if work.index.device.type == "cpu":
        return work
    count = work.count.cpu()
    longest = int(count.max())
    used = torch.arange(longest) < count[..., None]
    weights = work.weights.view(*count.shape, -1, work.weights.shape[-1])[..., :longest].cpu()
    index = work.index[..., :longest].contiguous().cpu()
    return replace(
        work,
        index=index,
        count=count,
        weights=weights.where(used[:, :, None], 0.0).flatten(1, 2),
        lse=work.lse.cpu(),
    )
