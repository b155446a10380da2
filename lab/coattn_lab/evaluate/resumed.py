"""Many rows over one text: the exact prefill is the same for all of them, so it is done once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.hf.attach import attach
from coattn.method.row import Method
from coattn.parts.executor.cpu import to_host
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.tools.evaluate.forced import Attached, Forced, Progress
from coattn.types import Selection, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import State
    from coattn.step.runtime import LayerGroup


@dataclass(frozen=True)
class Prefilled:
    """The first tokens of a text as a model has read them.

    kv: k, v `[prefill, kv_heads, head_dim]` of every layer, keys after RoPE.
    """

    ids: Tensor
    prefill: int
    kv: list[tuple[Tensor, Tensor]]


class FirstKV(Probe):
    """Keeps the keys and values of the first step."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        if layer not in self.kept:
            self.kept[layer] = k.clone(), v.clone()


class Shares(Probe):
    """The share of the entries that a query head attends to, the mean over heads, layer after layer."""

    def open(self, runtime: Runtime) -> None:
        self.shares: list[list[float]] = [[] for _ in runtime.layers]

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        shown = [part.in_reach(call.step.seqs) for part in (selection.gpu, selection.host) if part is not None]
        entries = sum(float(part.tokens.double().mean()) for part in shown)
        if selection.rows is not None:
            entries += float((to_host(selection.rows).weights > 0).sum(-1).double().mean())
        self.shares[call.layer].append(entries / call.step.lengths[0])


@torch.inference_mode()
def prefill_once(model: PreTrainedModel, ids: Tensor, prefill: int) -> Prefilled:
    """ids `[tokens]`; the first `prefill` of them are read, once."""
    first = FirstKV()
    with attach(model, "full") as attachment:
        device = model.get_input_embeddings().weight.device
        Attached(attachment, ids[None].to(device), [first]).prefill(prefill)
    return Prefilled(ids, prefill, [first.kept[i] for i in sorted(first.kept)])


@torch.inference_mode()
def resume(
    model: PreTrainedModel, begun: Prefilled, method: str | Method, progress: Progress | None = None, **params: Any
) -> tuple[Forced, list[float]]:
    """The rest of the text as decode steps under a method -> predictions, and the share attended of each layer.

    The cache is given the keys and values of the prefill; maintenance that listens to queries too hears none.
    """
    counted = Shares()
    device = model.get_input_embeddings().weight.device
    windows, kept, losses = begun.ids[None].to(device), [], []
    with attach(model, method, **params) as attachment:
        reader = Attached(attachment, windows, [counted])
        conversation = reader.cache.conversation
        conversation.begin(1, begun.prefill, None)
        runtime = conversation.runtime
        assert runtime is not None
        assert conversation.running is not None
        for layer, (k, v) in enumerate(begun.kv):
            runtime.import_kv(conversation.running, layer, k, v, None, 1.0)
        conversation.commit()
        for i in range(begun.prefill, windows.shape[1]):
            kept.append(reader.decode(i).cpu())
            if i + 1 < windows.shape[1]:
                losses.append(torch.nn.functional.cross_entropy(kept[-1], windows[:, i + 1].cpu()).double())
            if progress:
                progress(i + 1 - begun.prefill, windows.shape[1] - begun.prefill)
        shares = [sum(each) / len(each) for each in counted.shares]
        done = Forced(0, torch.stack(losses), torch.cat(kept), attachment.report())
    return done, shares
