"""The protocol: prefill exactly, then decode under the method while the text says what comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.hf.architectures import PreTrainedModel
from coattn.hf.logits import logit_chunks
from coattn.method.row import Method
from coattn.step.probe import Probe
from coattn.tools.evaluate.steps import Steps

Progress = Callable[[int, int], None]
"""`(tokens done, tokens in all)` of every window of a batch"""


class Forced(NamedTuple):
    """A text forced through a model under a method; with several windows, each tensor has them as first dimension.

    losses: `[tokens - 1]` float64, negative log-likelihood of each token but the first; those of the prefill are left
    out (and the first loss is that of the second decoded token) when they were not asked for.
    logits: `[decoded, vocabulary]` float32, the prediction after each decode step. step_ms: of a decode step of all
    windows, the median, with its logits on the host.
    """

    prefilled: int
    losses: Tensor
    logits: Tensor
    report: dict[str, Any]
    step_ms: float = 0.0

    def windows(self) -> list[Forced]:
        """One by one, after a run over several."""
        pairs = zip(self.losses, self.logits, strict=True)
        return [Forced(self.prefilled, *pair, self.report, self.step_ms) for pair in pairs]


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
    **params: Any,
) -> Forced:
    """ids `[tokens]` or `[windows, tokens]`: the first `prefill` in one exact prefill, the others one decode step each.

    Windows run as one batch, each a sequence of its own. Cost: holds the logits of the decode steps; those of the
    prefill are scored a chunk at a time.
    """
    windows = ids.view(-1, ids.shape[-1]).to(model.get_input_embeddings().weight.device)
    count, length = windows.shape
    losses, kept, took = [torch.empty(count, 0, dtype=torch.float64)], list[Tensor](), list[float]()
    with Steps(model, windows, method, gpu_kv, host_kv, params, probes) as steps:
        hidden = steps.prefill(prefill)
        if score_prefill:
            losses.append(torch.stack([_score(model, *pair) for pair in zip(hidden, windows, strict=True)]))
        if progress:
            progress(prefill, length)
        for i in range(prefill, length):
            since = time.perf_counter()
            logits = steps.decode(i)
            kept.append(logits.cpu())
            took.append(time.perf_counter() - since)
            if i + 1 < length:
                losses.append(_losses(logits, windows[:, i + 1])[:, None])
            if progress:
                progress(i + 1, length)
        scored, shown = torch.cat(losses, 1), torch.stack(kept, 1) if kept else torch.empty(count, 0, 0)
        middle = 1e3 * sorted(took)[len(took) // 2] if took else 0.0
        forced = Forced(prefill, scored, shown, steps.report(), middle)
    return forced if ids.ndim == 2 else forced.windows()[0]


def _score(model: PreTrainedModel, hidden: Tensor, ids: Tensor) -> Tensor:
    """hidden `[prefilled, hidden_size]` of one window -> the loss of the token after each, as far as there is one."""
    losses = []
    for start, logits in logit_chunks(model, hidden):
        targets = ids[start + 1 : start + 1 + len(logits)]
        losses.append(_losses(logits[: len(targets)], targets))
    return torch.cat(losses)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu()
