"""Many rows over one text: the exact prefill is the same for all of them, so it is done once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.evaluate.forced import Attached, Forced, Progress
from coattn.hf.attach import Attachment, attach
from coattn.method import Method, Parts
from coattn.place.base import State
from coattn.runtime import Runtime
from coattn.types import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Prefilled:
    """The first tokens of a text as a model has read them.

    kv: k, v `[prefill, kv_heads, head_dim]` of every layer, keys after RoPE.
    """

    ids: Tensor
    prefill: int
    kv: list[tuple[Tensor, Tensor]]


class Keeping(Runtime):
    """Full attention that also keeps the keys and values of its first step."""

    def __init__(
        self, attachment: Attachment, seqs: int, tokens: int | None, kept: dict[int, tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens)
        self.kept = kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer not in self.kept:
            self.kept[layer] = k.clone(), v.clone()
        return super().attend(layer, q, k, v, scale)


class Counting(Runtime):
    """Counts the entries that a query head attends to, the mean over heads, layer after layer."""

    def __init__(self, attachment: Attachment, seqs: int, tokens: int | None) -> None:
        super().__init__(attachment.layers, attachment.composed, attachment.ledger, seqs, tokens)
        self.shares: list[list[float]] = [[] for _ in attachment.layers]

    def observe(self, parts: Parts, layer: int, states: list[State], picked: Selection) -> None:
        super().observe(parts, layer, states, picked)
        assert self.step is not None
        rows = parts.store.step_table.rows
        shown = [part.in_reach(rows) for part in (picked.near, picked.far) if part is not None]
        entries = sum(float(part.tokens.double().mean()) for part in shown)
        if picked.weighted is not None:
            entries += float((picked.weighted.weights > 0).sum(-1).double().mean())
        self.shares[layer].append(entries / self.step.lengths[0])


@torch.inference_mode()
def prefill_once(model: PreTrainedModel, ids: Tensor, prefill: int) -> Prefilled:
    """ids `[tokens]`; the first `prefill` of them are read, once."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with attach(model, "full") as attachment:
        device = model.get_input_embeddings().weight.device
        Attached(attachment, ids[None].to(device), lambda a, s, t: Keeping(a, s, t, kept)).prefill(prefill)
    return Prefilled(ids, prefill, [kept[i] for i in sorted(kept)])


@torch.inference_mode()
def resume(
    model: PreTrainedModel, begun: Prefilled, method: str | Method, progress: Progress | None = None, **params: Any
) -> tuple[Forced, list[float]]:
    """The rest of the text as decode steps under a method -> predictions, and the share attended of each layer.

    The store is given the keys and values of the prefill; one that listens to queries too hears none.
    """
    runtimes: list[Counting] = []

    def watch(attachment: Attachment, seqs: int, tokens: int | None) -> Counting:
        runtimes.append(Counting(attachment, seqs, tokens))
        return runtimes[0]

    device = model.get_input_embeddings().weight.device
    windows, kept, losses = begun.ids[None].to(device), [], []
    with attach(model, method, **params) as attachment:
        reader = Attached(attachment, windows, watch)
        conversation = reader.cache.conversation
        conversation.begin(1, begun.prefill, None)
        runtime, step = runtimes[0], runtimes[0].step
        assert step is not None
        for layer, (k, v) in enumerate(begun.kv):
            runtime._parts[layer].store.append(layer, k, v, step)
        conversation.commit()
        for i in range(begun.prefill, windows.shape[1]):
            kept.append(reader.decode(i).cpu())
            if i + 1 < windows.shape[1]:
                losses.append(torch.nn.functional.cross_entropy(kept[-1], windows[:, i + 1].cpu()).double())
            if progress:
                progress(i + 1 - begun.prefill, windows.shape[1] - begun.prefill)
        shares = [sum(each) / len(each) for each in runtime.shares]
        done = Forced(0, torch.stack(losses), torch.cat(kept), attachment.report())
    return done, shares
