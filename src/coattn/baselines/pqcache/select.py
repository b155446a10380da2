"""PQCache's rule: sinks, recent tokens, and the best of the others by the codes of their keys."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.baselines.pqcache.index import PromptCodes
from coattn.cache.step_table import StepTable
from coattn.part import check_count, check_number
from coattn.parts.call import AttentionCall
from coattn.parts.select.host_tokens import HostTokens
from coattn.types import BlockList


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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sinks", self.sinks, 0)
        check_number("compress", self.compress, 0, 1, above=True)
        check_number("recent_share", self.recent_share, 0, 1)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"sinks": tokens}

    def choose(self, call: AttentionCall, table: StepTable, gpu: BlockList, host: BlockList) -> tuple[Tensor, Tensor]:
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
        return order, count.clamp(max=room).expand(-1, order.shape[1])
