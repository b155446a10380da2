"""The smallest set of entries whose estimated weights hold a share of the mass (HCAttention, section 3.2)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.config import CacheConfig
from coattn.cache.kv import KVCache
from coattn.cache.step_table import StepTable
from coattn.errors import ConfigError
from coattn.kernels.attend import attend
from coattn.kernels.cuda.top_p import Work, refuses
from coattn.kernels.cuda.top_p import top_p as on_gpu
from coattn.kernels.sink_logits import with_sink_piece
from coattn.kernels.top_p import TAILS, top_p
from coattn.part import check_count, check_number
from coattn.parts.call import AttentionCall
from coattn.parts.index.base import Index
from coattn.parts.index.codes.index import Codes
from coattn.parts.select.base import Select
from coattn.types import BlockList, RowWork, Selection, Term

RESTS = ("mean", "none", "zero")


@dataclass
class PqTopP(Select):
    """Attends to all that lies on the GPU, and per query head to the fewest entries in DRAM that bring the mass to
    `tau`.

    Scores come from the codes of the keys. With `union` a head also attends to what the other query heads of its KV
    head keep, whose values are read for them anyway. Nothing is discarded: the next query selects afresh.
    """

    name = "pq_top_p"
    needs = frozenset({"codes"})
    provides = frozenset({"weighs"})
    help_text = {
        "tau": "share of the softmax mass that is attended, per query head; 1: everything",
        "cap": "most entries in DRAM that a query head attends to; unset: no limit",
        "tail": "what is left out counts as if it had the mean value (mean), not at all (none), or keeps its weight "
        "without a value, as in the paper's equation 5 (zero)",
        "union": "a query head also attends to what the other heads of its KV head keep, which is read anyway",
    }

    tau: float = 0.9
    cap: int | None = None
    tail: str = "mean"
    union: bool = True
    index: Codes = field(init=False, repr=False)
    _work: Work | None = field(init=False, repr=False, default=None)
    """What the kernels of a GPU share from call to call; None where there are none."""
    _refused: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_number("tau", self.tau, 0, 1, above=True)
        check_count("cap", self.cap, 1, unset=True)
        if self.tail not in RESTS:
            raise ConfigError(f"tail is {self.tail!r}, which is not known.", f"Set tail to one of: {', '.join(RESTS)}.")

    def open(self, cache: KVCache, index: Index, maintenance: Any) -> None:
        super().open(cache, index, maintenance)
        self._work, shape = None, cache.spec.shape
        if shape.device.type == "cuda":
            self._refused = refuses(shape.device, shape.q_heads // shape.kv_heads, cache.block)
            if self._refused is None:
                self._work = Work(shape.device)

    def uncaptured(self) -> str | None:
        return self._refused

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"tau": 1.0, "cap": None}

    def works(self, config: CacheConfig) -> frozenset[str]:
        return frozenset({"gpu", "rows", "term"} if self._has_tail() else {"gpu", "rows"})

    def is_exact(self) -> bool:
        return self.tau >= 1 and self.cap is None

    def pick(self, call: AttentionCall) -> Selection:
        visible = call.visible
        if call.table is None or visible.host is None:
            return visible
        assert visible.gpu is not None, "a decode step sees its own token"
        # so few that attending to them twice is less than keeping what was found
        near = attend(call.q, self.cache.gpu.memory[call.layer], visible.gpu, call.scale, call.shape.softcap)
        gpu_lse = with_sink_piece(near.lse, call.shape.sink_logits)
        pick = self._pick_here if self._work is None else self._pick_there
        work, left = pick(call, call.table, visible.host, gpu_lse)
        if not self._has_tail():
            return Selection.of(visible.gpu, None, work)
        mean = self.index.means.of(call.layer, call.table, call.shape)
        return Selection.of(visible.gpu, None, work, Term(mean[:, None], left[:, None].to(mean.device)))

    def _has_tail(self) -> bool:
        return self.tail == "mean" and not self.is_exact()

    def _pick_here(
        self, call: AttentionCall, table: StepTable, host: BlockList, gpu_lse: Tensor
    ) -> tuple[RowWork, Tensor]:
        """The entries to attend to, and the lse of the others `[seqs, q_heads]`."""
        scores = self.index.scores(call.layer, call.q[:, 0], table, call.scale)
        kept = top_p(scores, gpu_lse.logsumexp(1).view(scores.shape[:-1]), self.tau, self.cap)
        if self.union:
            kept = kept.any(2, keepdim=True).expand_as(kept) & (scores > -torch.inf)
        return weigh(scores, kept, host, self.tail == "zero"), scores.masked_fill(kept, -torch.inf).logsumexp(
            -1
        ).flatten(1)

    def _pick_there(
        self, call: AttentionCall, table: StepTable, host: BlockList, gpu_lse: Tensor
    ) -> tuple[RowWork, Tensor]:
        """The same by kernels on the GPU; nothing waits."""
        assert self._work is not None
        _, _, top = self._work.of(len(call.q) * call.shape.q_heads)
        scores = self.index.scores(call.layer, call.q[:, 0], table, call.scale, top)
        kind = TAILS.index("mean" if self._has_tail() else "zero" if self.tail == "zero" else "renormalise")
        lens, most = table.column("host_lens"), scores.shape[-1]
        kept = on_gpu(scores, lens, gpu_lse, self.tau, self.cap, kind, most, self._work, self.union)
        ids = host.table if host.on_host is None else host.on_host.table
        return RowWork(ids, kept.index, kept.count, kept.weights, kept.lse), kept.others


def weigh(scores: Tensor, kept: Tensor, host: BlockList, of_all: bool = False) -> RowWork:
    """scores and which to keep, `[seqs, kv_heads, group, n]` -> the entries that any query head of a group keeps.

    of_all: weights are of all scores, not of those that are kept. On the host, where the values are. Waits for the
    device.
    """
    chosen = scores.masked_fill(~kept, -torch.inf)
    lse = (scores if of_all else chosen).logsumexp(-1)
    weights = (chosen - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    union = kept.any(2)
    count = union.sum(-1, dtype=torch.int32)
    most = int(count.max())
    index = torch.zeros(*union.shape[:2], most, dtype=torch.int64, device=scores.device)
    seq, head, position = union.nonzero(as_tuple=True)
    index[seq, head, (union.cumsum(-1) - 1)[seq, head, position]] = position
    weights = weights.gather(-1, index[:, :, None].expand(-1, -1, scores.shape[2], -1))
    weights = weights.where((torch.arange(most, device=scores.device) < count[..., None])[:, :, None], 0.0)
    table = host.table if host.on_host is None else host.on_host.table
    return RowWork(table.cpu(), index.int().cpu(), count.cpu(), weights.flatten(1, 2).cpu(), lse.flatten(1).cpu())
