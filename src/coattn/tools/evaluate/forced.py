"""The protocol: prefill exactly, then decode under the method while the text says what comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from coattn.hf.attach import Attachment, attach
from coattn.hf.logits import head, logit_chunks
from coattn.method.row import Method
from coattn.step.probe import Probe
from coattn.tools.evaluate.steps import Steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
"""`(tokens done, tokens in all)` of every window of a batch"""


@dataclass(frozen=True)
class Forced:
    """A text forced through a model under a method; with several windows, each tensor has them as first dimension.

    losses: `[tokens - 1]` float64, negative log-likelihood of each token but the first; those of the prefill are left
    out (and the first loss is that of the second decoded token) when they were not asked for.
    logits: `[decoded, vocabulary]` float32, the prediction after each decode step.
    """

    prefilled: int
    losses: Tensor
    logits: Tensor
    report: dict[str, Any]

    def windows(self) -> list[Forced]:
        """One by one, after a run over several."""
        return [Forced(self.prefilled, *pair, self.report) for pair in zip(self.losses, self.logits, strict=True)]


class Reader(Protocol):
    """Windows on their way through a model: by `attach`, or by the engine's steps."""

    def prefill(self, tokens: int) -> Tensor:
        """The first tokens of every window, exactly -> hidden `[windows, tokens, hidden_size]`."""

    def decode(self, at: int) -> Tensor:
        """Token `at` of every window as a decode step -> logits `[windows, vocabulary]`."""

    def report(self) -> dict[str, Any]:
        """The method and its KV bytes."""


class Attached:
    """A Reader over an attachment, at which probes may look."""

    def __init__(self, attachment: Attachment, windows: Tensor, probes: Sequence[Probe] = ()) -> None:
        self.attachment, self.windows = attachment, windows
        attachment.probes.extend(probes)
        self.cache = attachment.new_cache(windows.shape[1])

    def prefill(self, tokens: int) -> Tensor:
        return self._read(0, tokens)

    def decode(self, at: int) -> Tensor:
        return head(self.attachment.model, self._read(at, at + 1)[:, 0])

    def report(self) -> dict[str, Any]:
        return self.attachment.report()

    def _read(self, start: int, end: int) -> Tensor:
        decoder = self.attachment.model.get_decoder()
        found: Tensor = decoder(input_ids=self.windows[:, start:end], past_key_values=self.cache, use_cache=True)[0]
        return found


@torch.inference_mode()
def force(
    model: PreTrainedModel,
    ids: Tensor,
    prefill: int,
    method: str | Method,
    gpu_kv: int | str | None = None,
    host_kv: int | str | None = None,
    progress: Progress | None = None,
    score_prefill: bool = True,
    probes: Sequence[Probe] = (),
    by_steps: bool | None = None,
    **params: Any,
) -> Forced:
    """ids `[tokens]` or `[windows, tokens]`: the first `prefill` in one exact prefill, the others one decode step each.

    Windows run as one batch, each a sequence of its own. Cost: holds the logits of the decode steps; those of the
    prefill are scored a chunk at a time. by_steps: through the engine's steps; by default on a GPU, where they are
    captured, unless somebody looks on.
    """
    windows = ids.view(-1, ids.shape[-1]).to(model.get_input_embeddings().weight.device)
    if by_steps is None:
        by_steps = windows.device.type == "cuda" and not probes
    if by_steps:
        with Steps(model, windows, method, gpu_kv, host_kv, params) as steps:
            return _run(model, steps, ids, windows, prefill, score_prefill, progress)
    with attach(model, method, gpu_kv=gpu_kv, host_kv=host_kv, **params) as attachment:
        return _run(model, Attached(attachment, windows, probes), ids, windows, prefill, score_prefill, progress)


def _run(
    model: PreTrainedModel,
    reader: Reader,
    ids: Tensor,
    windows: Tensor,
    prefill: int,
    score_prefill: bool,
    progress: Progress | None,
) -> Forced:
    length = windows.shape[1]
    losses: list[Tensor] = []
    kept: list[Tensor] = []
    hidden = reader.prefill(prefill)
    if score_prefill:
        losses.append(torch.stack([_score(model, *pair) for pair in zip(hidden, windows, strict=True)]))
    if progress:
        progress(prefill, length)
    for i in range(prefill, length):
        logits = reader.decode(i)
        kept.append(logits.cpu())
        if i + 1 < length:
            losses.append(_losses(logits, windows[:, i + 1])[:, None])
        if progress:
            progress(i + 1, length)
    return _forced(ids, prefill, losses, kept, reader.report())


def _forced(ids: Tensor, prefill: int, losses: list[Tensor], kept: list[Tensor], report: dict[str, Any]) -> Forced:
    count = ids.numel() // ids.shape[-1]
    scored = torch.cat(losses, 1) if losses else torch.empty(count, 0, dtype=torch.float64)
    shown = torch.stack(kept, 1) if kept else torch.empty(count, 0, 0)
    return Forced(prefill, scored.view(*ids.shape[:-1], -1), shown.view(*ids.shape[:-1], *shown.shape[1:]), report)


def _score(model: PreTrainedModel, hidden: Tensor, ids: Tensor) -> Tensor:
    """hidden `[prefilled, hidden_size]` of one window -> the loss of the token after each, as far as there is one."""
    found = []
    for start, logits in logit_chunks(model, hidden):
        targets = ids[start + 1 : start + 1 + len(logits)]
        found.append(_losses(logits[: len(targets)], targets))
    return torch.cat(found)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu()
