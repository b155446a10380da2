"""PQCache's rule: sinks, recent tokens, and the best of the others by the codes of their keys."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.baselines.pqcache.index import PromptCodes
from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.kernels.attend import attend
from coattn.part import check_count, check_number
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.executor.pull import Pull
from coattn.parts.index.base import Index
from coattn.parts.select.host_tokens import HostTokens, list_tokens, token_memory
from coattn.types import BlockList, Selection, Step


@dataclass
class CodeTop(HostTokens):
    """Attends to all that lies on the GPU, and in DRAM to sinks, to recent tokens and to the best of each KV head.

    A token's score is its weight by the codes, in a softmax over those that can be chosen, summed over the group.
    """

    name = "code_top"
    needs = frozenset({*HostTokens.needs, "prompt_codes"})
    help_text = {
        "sinks": "first tokens that are always attended",
        "compress": "share of a prompt, the sinks left out, that is attended after it: recent tokens and chosen ones",
        "recent_share": "share of that for the most recent tokens; the others are chosen",
        "dense_layers": "first layers that attend to everything",
    }

    sinks: int = 32
    compress: float = 0.1
    recent_share: float = 0.5
    index: PromptCodes = field(init=False, repr=False)
    asked: dict[int, tuple[Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By layer, for `after` of the maintenance, which runs beside the layers that follow: the last step's positions,
    and which were chosen. Kept until the next step picks: until then nobody else gets their memory."""
    _hits: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    """By layer `[rows]` float32: tokens that the last decode step found in the cache, the mean over KV heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sinks", self.sinks, 0)
        check_number("compress", self.compress, 0, 1, above=True)
        check_number("recent_share", self.recent_share, 0, 1)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"sinks": tokens}

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        self._hits = {layer: torch.zeros_like(self._taken[layer]) for layer in self.index.hot}

    def works(self, config: CacheConfig) -> frozenset[str]:
        return super().works(config) | {CachedWork.kind}

    def pick(self, call: AttentionCall) -> Selection:
        hot, visible, table = self.index.hot.get(call.layer), call.visible, call.table
        if hot is None or table is None or visible.host is None or call.layer < self.dense_layers:
            self.asked.pop(call.layer, None)
            return super().pick(call)
        gpu, host = visible.gpu, visible.host
        assert gpu is not None, "a decode step sees its own token"
        tokens, count, fixed = self._choose(call, table, gpu, host)
        rank = torch.arange(tokens.shape[-1], device=tokens.device)
        listed = rank < count[..., None]
        here, place = hot.find(table.seq, tokens)
        hit, miss = listed & here, listed & ~here
        hits, misses = hit.sum(-1), miss.sum(-1)
        self.asked[call.layer] = tokens, listed & (rank >= fixed[..., None])
        self._hits[call.layer][: len(count)] = hits.float().mean(1)
        self._taken[call.layer][: len(count)] = misses.float().mean(1)
        cached = BlockList(
            place.gather(-1, _first(hit)), hits.to(torch.int32), tokens.shape[-1], token_memory(hot.memory)
        )
        memory = self.cache.dram.memory[call.layer]
        return Selection.of(gpu, list_tokens(host, memory, tokens.gather(-1, _first(miss)), misses), CachedWork(cached))

    def report(self, step: Step) -> dict[str, Any]:
        """`attended_host`: tokens that came over PCIe; `cached_entries`: those that the cache on the GPU had."""
        found = super().report(step)
        if not self._hits:
            return found
        hits = sum(float(own[: step.seqs].sum()) for own in self._hits.values())
        return {**found, "cached_entries": hits / len(self._taken)}

    def release(self) -> None:
        super().release()
        self.asked.clear()
        self._hits.clear()

    def choose(self, call: AttentionCall, table: StepTable, gpu: BlockList, host: BlockList) -> tuple[Tensor, Tensor]:
        tokens, count, _ = self._choose(call, table, gpu, host)
        return tokens, count

    def _choose(
        self, call: AttentionCall, table: StepTable, gpu: BlockList, host: BlockList
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`choose`, and how many of the first are sinks and recent tokens, `[rows, kv_heads]`."""
        width, lens = host.longest, table.column("host_lens")[:, None]
        scores = self.index.scores(call.layer, call.q[:, 0], table, call.scale, width)
        # sizes are those of the prompt, positions are counted now
        prompt = (self.index.prompt[table.seq.long()] - self.sinks).clamp(min=0)[:, None].double()
        recent = (prompt * self.compress * self.recent_share).long()
        top = (prompt * self.compress * (1 - self.recent_share)).long()
        few = prompt <= self.index.centroids  # such a prompt is attended as a whole, and a few tokens after it
        position = torch.arange(width, device=scores.device)
        begin = (lens + gpu.tokens - 1 - recent).clamp(min=self.sinks)
        stored = position < lens
        always = stored & ((position < self.sinks) | (position >= begin))
        open_to = stored & ~always
        weights = scores.masked_fill(~open_to[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0).sum(2)
        wanted = weights.masked_fill(~stored[:, None], -1.0).masked_fill(always[:, None], torch.inf)
        whole = self.sinks + self.index.centroids  # whatever the width: a captured step has more room than it needs
        room = min(width, max(whole, self.sinks + int(self.compress * (width + gpu.longest)) + 2))
        chosen = always.sum(-1, keepdim=True) + top.minimum(open_to.sum(-1, keepdim=True))
        count = torch.where(few, lens.clamp(max=whole), chosen)
        # tokens with the same codes are as good as each other: the oldest first, whatever the width
        order = wanted.sort(dim=-1, descending=True, stable=True).indices[..., :room]
        fixed = always.sum(-1, keepdim=True).expand(-1, order.shape[1])
        return order, count.clamp(max=room).expand(-1, order.shape[1]), fixed


@dataclass(frozen=True)
class CachedWork:
    """Attention over single tokens in the cache on the GPU."""

    kind = "cached"
    blocks: BlockList


@dataclass
class CachedPull(Pull):
    """What is in the cache on the GPU is attended there, the rest as `pull` does."""

    name = "cached_pull"
    runs = Pull.runs | {CachedWork.kind}

    def run(self, call: AttentionCall, work: Any) -> State:
        if isinstance(work, CachedWork):
            assert isinstance(work.blocks.memory, Tensor)
            return attend(call.q, work.blocks.memory, work.blocks, call.scale, call.shape.softcap)
        return super().run(call, work)


def _first(wanted: Tensor) -> Tensor:
    """An order in which the wanted ones come first."""
    return (~wanted).to(torch.uint8).argsort(dim=-1, stable=True)
