"""The smallest set of entries whose estimated weights hold a share of the mass (HCAttention, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.attend import attend
from coattn.ops.reference.top_p import TAILS, top_p
from coattn.part import check_count, check_number
from coattn.select.base import Select
from coattn.store.base import Store
from coattn.types import BlockList, Selection, Step, Weighted

if TYPE_CHECKING:
    from coattn.ops.cuda.top_p import Work


@dataclass
class PqTopP(Select):
    """Attends to all that is near, and per query head to the fewest far entries that bring the mass to `tau`.

    Far scores come from what the store keeps of the keys. With `union` a head also attends to what the other query
    heads of its KV head keep, whose values are read for them anyway. Nothing is discarded: the next query selects
    afresh.
    """

    name = "pq_top_p"
    needs = frozenset({"near", "codes"})
    provides = frozenset({"weighs"})
    exact = False
    help_text = {
        "tau": "share of the softmax mass that is attended, per query head; 1: everything",
        "cap": "most far entries that a query head attends to; unset: no limit",
        "tail": "what is left out counts as if it had the mean value (mean), not at all, so that weights add up to one "
        "(renormalise), or as zero (zero)",
        "union": "a query head also attends to what the other heads of its KV head keep, which is read anyway",
    }

    tau: float = 0.9
    cap: int | None = None
    tail: str = "mean"
    union: bool = True
    _work: Work | None = field(init=False, repr=False, default=None)
    """What the kernels of a GPU share from call to call; None where there are none."""
    _refused: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        check_number("tau", self.tau, 0, 1, above=True)
        if self.cap is not None:
            check_count("cap", self.cap, 1)
        if self.tail not in TAILS:
            raise ConfigError(f"tail is {self.tail!r}, which is not known.", f"Set tail to one of: {', '.join(TAILS)}.")

    def open(self, store: Store) -> None:
        shape = next(iter(store.opening.layers.values()))
        self._work = None
        if shape.device.type == "cuda":
            from coattn.ops.cuda.top_p import Work, refuses

            self._refused = refuses(shape.device, shape.q_heads // shape.kv_heads, store.block)
            if self._refused is None:
                self._work = Work(shape.device)

    def uncaptured(self) -> str | None:
        return self._refused

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"tau": 1.0, "cap": None}

    def fills(self, store: Store) -> frozenset[str]:
        return frozenset({"near", "weighted", "tail"} if self._has_tail() else {"near", "weighted"})

    def is_exact(self) -> bool:
        return self.tau >= 1 and self.cap is None

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        view = store.view(layer, step)
        if view.far is None:
            return view
        if self._work is not None:
            return self._pick_there(layer, q, store, step, view, self._work)
        scores = store.scores(layer, q[:, 0], self.scale, step)
        near = self._near(layer, q, store, view.near).view(scores.shape[:-1])
        kept = top_p(scores, near, self.tau, self.cap)
        if self.union:
            kept = kept.any(2, keepdim=True).expand_as(kept) & (scores > -torch.inf)
        found = weigh(scores, kept, view.far, self.tail != "zero", store.keeps_keys())
        tail = scores.masked_fill(kept, -torch.inf).logsumexp(-1).flatten(1) if self._has_tail() else None
        return Selection(view.near, weighted=found, tail=tail)

    def _has_tail(self) -> bool:
        return self.tail == "mean" and not self.is_exact()

    def _pick_there(self, layer: int, q: Tensor, store: Store, step: Step, view: Selection, work: Work) -> Selection:
        """The same by kernels on the GPU; nothing waits."""
        from coattn.ops.cuda.top_p import top_p as on_gpu

        shape, seqs, near = store.opening.layers[layer], len(q), None
        if view.near is not None:
            # so few that attending to them twice is less than keeping what was found
            near = attend(q, store.near[layer], view.near, self.scale, shape.softcap).lse
        _, _, top = work.of(seqs * shape.q_heads)
        scores = store.scores(layer, q[:, 0], self.scale, step, top)
        tokens = store.far_tokens(layer, step)
        most = scores.shape[-1]
        kind = self.tail if self._has_tail() or self.tail == "zero" else "renormalise"
        kept = on_gpu(scores, tokens, near, self.tau, self.cap, TAILS.index(kind), most, work, self.union)
        tail = kept.others if self._has_tail() else None
        assert view.far is not None
        others = None
        if store.keeps_keys():
            others = kept.others if tail is None else torch.full_like(kept.lse, -torch.inf)
        table = view.far.table if view.far.on_host is None else view.far.on_host.table
        found = Weighted(table, kept.index, kept.count, kept.weights, kept.lse, others)
        return Selection(view.near, weighted=found, tail=tail)

    def _near(self, layer: int, q: Tensor, store: Store, near: BlockList | None) -> Tensor:
        """The lse of what is near, `[seqs, q_heads]` float32."""
        if near is None:
            return torch.full(q.shape[::2][:2], -torch.inf, device=q.device)
        shape = store.opening.layers[layer]
        keys = store.near[layer][:, :, 0][near.table[:, 0].long()]  # [seqs, blocks, kv_heads, block, d]
        keys = keys.transpose(1, 2).flatten(2, 3).float()
        grouped = q.float().view(len(q), shape.kv_heads, -1, shape.head_dim) * self.scale
        scores = torch.einsum("shxd,shnd->shxn", grouped, keys)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        absent = torch.arange(scores.shape[-1], device=q.device) >= near.tokens[:, :, None, None]
        return scores.masked_fill(absent, -torch.inf).logsumexp(-1).flatten(1)


def weigh(scores: Tensor, kept: Tensor, far: BlockList, renormalise: bool, rescored: bool) -> Weighted:
    """scores and which to keep, `[seqs, kv_heads, group, n]` -> the entries that any query head of a group keeps.

    On the host, where the values are. Waits for the device.
    """
    whole = scores.logsumexp(-1)
    chosen = scores.masked_fill(~kept, -torch.inf)
    own = chosen.logsumexp(-1)
    lse = own if renormalise else whole
    weights = (chosen - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    others = None
    if rescored:
        left = scores.masked_fill(kept, -torch.inf).logsumexp(-1)
        others = (torch.full_like(left, -torch.inf) if renormalise else left).flatten(1).cpu()
    union = kept.any(2)
    count = union.sum(-1, dtype=torch.int32)
    most = int(count.max())
    index = torch.zeros(*union.shape[:2], most, dtype=torch.int64, device=scores.device)
    seq, head, position = union.nonzero(as_tuple=True)
    index[seq, head, (union.cumsum(-1) - 1)[seq, head, position]] = position
    weights = weights.gather(-1, index[:, :, None].expand(-1, -1, scores.shape[2], -1))
    weights = weights.where((torch.arange(most, device=scores.device) < count[..., None])[:, :, None], 0.0)
    return Weighted(
        far.table, index.int().cpu(), count.cpu(), weights.flatten(1, 2).cpu(), lse.flatten(1).cpu(), others
    )
