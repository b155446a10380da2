"""One prompt, one answer, under a method: what `coattn generate` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import ConfigError
from coattn.hf.generate import positions, room
from coattn.hf.load import Loaded
from coattn.method.row import Method

GPU_CHUNK_TOKENS = 8192
"""Tokens of a prompt per step on a GPU; elsewhere the prompt is read at once."""


@dataclass(frozen=True)
class Generation:
    """An answer and what it took."""

    text: str
    prompt_ids: Tensor
    """`[tokens]`"""
    new_ids: Tensor
    """`[tokens]`, the end token included if there was one."""
    prefill_s: float
    """Until the first token."""
    decode_s: float
    """From the first token to the last."""
    report: dict[str, Any]
    finish_reason: str
    """stop: the end token; length: as many tokens as were asked for, or as the model has positions."""

    @property
    def tokens_per_s(self) -> float | None:
        """Decode steps per second; None when there was only one token."""
        steps = len(self.new_ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


def generate(
    loaded: Loaded,
    ids: Tensor,
    method: str | Method | None,
    *,
    sampling: SamplingParams,
    gpu_kv: int | str | None = None,
    host_kv: int | str | None = None,
    weights_on_gpu: float | None = None,
    devices: Sequence[str] | None = None,
    device_shares: Sequence[float] | None = None,
    params: dict[str, Any] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continues ids `[tokens]` under a method. on_text gets pieces of the answer as they become final."""
    left, limit = room(loaded, len(ids)), positions(loaded)
    if limit is not None and sampling.max_new_tokens > limit:
        raise ConfigError(
            f"max_new_tokens is {sampling.max_new_tokens:,}, but {loaded.name} has only {limit:,} positions.",
            f"Give {left} or less.",
        )
    count = sampling.max_new_tokens if left is None else min(sampling.max_new_tokens, left)
    on_gpu = loaded.model.device.type == "cuda" or weights_on_gpu is not None or (devices or [""])[0][:4] == "cuda"
    chunk = GPU_CHUNK_TOKENS if on_gpu else len(ids)
    with LLM(
        loaded,
        method,
        gpu_kv=gpu_kv,
        host_kv=host_kv,
        max_batch=1,
        max_length=len(ids) + count,
        chunk=chunk,
        weights_on_gpu=weights_on_gpu,
        devices=devices,
        device_shares=device_shares,
        **(params or {}),
    ) as engine:
        texts: list[str] = []
        tokens: list[int] = []
        part = None
        for part in engine.stream(ids.tolist(), sampling):
            if on_text is not None and part.text:
                on_text(part.text)
            texts.append(part.text)
            tokens.extend(part.token_ids)
        report = engine.report()
    assert part is not None, "a request always has a last part"
    if part.error is not None:
        raise part.error
    first, total = part.first_token_s or 0.0, part.total_s or 0.0
    return Generation("".join(texts), ids, torch.tensor(tokens), first, total - first, report, str(part.finish_reason))
